"""The heads of LUT and LeJEPA: shapes, names, statistics, ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from pospre import collectives
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
    monkeypatch.setattr(collectives.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        collectives.distributed, "get_world_size", lambda: 3
    )  # with the same rows each
    monkeypatch.setattr(collectives, "all_reduce", lambda value: 3 * value)
    found = head(rows)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(head.get_parameter(name).grad, parameter.grad)
    state = head.state_dict()
    variance: Any = twin[1].running_var
    unbiased = (variance - 0.9) * (6 / 7) * (21 / 20) + 0.9  # of 21 rows, not of 7
    torch.testing.assert_close(state.pop("1.running_var"), unbiased)
    for name, value in state.items():
        torch.testing.assert_close(value, twin.state_dict()[name])


def test_the_statistics_move_once_in_a_step_of_several_batches() -> None:
    heads, batches = [Projector(6, 8, 5) for _ in range(2)], torch.randn(2, 9, 6)
    state = {name: value.clone() for name, value in heads[0].state_dict().items()}
    heads[1].load_state_dict(state)
    parts = [[*batches], [*batches[:, :3]], [*batches[:, 3:]]]  # two calls in each
    for head, steps in zip(heads, (parts[:1], parts[1:]), strict=True):
        for step in steps:
            head.norms[0].begin()
            for rows in step:
                head(rows)
            head.norms[0].end(len(step[0]))
        for _ in range(2):  # the second has no batches
            head.norms[0].after_step()
    whole, split = (head.norms[0] for head in heads)
    torch.testing.assert_close(split.running_mean, whole.running_mean)
    assert whole.num_batches_tracked == split.num_batches_tracked == 2
    assert whole.running_mean is not None and whole.running_mean.any()
    ends = []
    for part in parts[1:]:  # each from the same start
        twin = plain(Projector(6, 8, 5))
        twin.load_state_dict(state)
        for rows in part:
            twin(rows)
        ends.append(len(part[0]) * twin.state_dict()["1.running_var"])
    torch.testing.assert_close(split.running_var, sum(ends) / 9)
    weight: Any = heads[0][0].weight
    mean = 0.9 * 0.1 * batches[0] @ weight.T + 0.1 * batches[1] @ weight.T
    torch.testing.assert_close(whole.running_mean, mean.mean(0))
