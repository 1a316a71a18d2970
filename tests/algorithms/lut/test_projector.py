"""The head of LUT: shapes, names, statistics, ranks."""

import pytest
import torch
from torch import nn

from pospre.algorithms.lut import projector
from pospre.algorithms.lut.projector import Projector
from pospre.model.teacher import Frozen


def plain(head: Projector) -> nn.Sequential:
    twin = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5, bias=False)
    )
    twin.load_state_dict(head.state_dict())
    return twin


def test_it_is_the_plain_head_on_a_cpu() -> None:
    head = Projector(6, 8, 5)
    twin, rows = plain(head), torch.randn(7, 6)
    torch.testing.assert_close(head(rows), twin(rows))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value)
    torch.testing.assert_close(head.eval()(rows), twin.eval()(rows))


def test_all_but_the_last_dimension_are_rows() -> None:
    head, rows = Projector(6, 8, 5), torch.randn(2, 3, 4, 6)
    twin = plain(head)
    torch.testing.assert_close(head(rows), twin(rows.flatten(0, 2)).view(2, 3, 4, 5))


def test_a_frozen_copy_keeps_its_statistics() -> None:
    head = Projector(6, 8, 5)
    frozen = Frozen(head).train()
    before = {key: value.clone() for key, value in frozen.state_dict().items()}
    assert not frozen(torch.randn(7, 6)).requires_grad
    assert all(torch.equal(frozen.state_dict()[key], value) for key, value in before.items())


def test_among_ranks_it_is_the_plain_head_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Projector(6, 8, 5)
    twin, rows = plain(head), torch.randn(7, 6)
    expected = twin(rows)
    expected.square().sum().backward()
    monkeypatch.setattr(projector.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(projector.dist, "get_world_size", lambda: 3)  # with the same rows each
    monkeypatch.setattr(projector, "all_reduce", lambda value: 3 * value)
    found = head(rows)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(head.get_parameter(name).grad, parameter.grad)
    state = head.state_dict()
    unbiased = (twin[1].running_var - 0.9) * (6 / 7) * (21 / 20) + 0.9  # of 21 rows, not of 7
    torch.testing.assert_close(state.pop("1.running_var"), unbiased)
    for name, value in state.items():
        torch.testing.assert_close(value, twin.state_dict()[name])
