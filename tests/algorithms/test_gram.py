"""Gram anchoring: the golden numbers, and what it is blind to."""

import pytest
import torch
from torch import Tensor

from pospre.algorithms.gram import GramAnchor, gram_differences
from pospre.model.comparison import Pair
from tests.algorithms.cases import Case

STUDENT = (torch.arange(12.0) % 5).view(1, 4, 3)
TARGET = (2 * torch.arange(12.0) % 7).view(1, 4, 3)


def near(found: Tensor, number: float) -> None:
    assert found.item() == pytest.approx(number, abs=1e-6)


def test_golden_numbers_of_one_image() -> None:
    near(gram_differences(STUDENT, TARGET), 0.081579)
    near(gram_differences(STUDENT - 2, TARGET - 3), 0.469110)
    near(gram_differences(STUDENT + 1, STUDENT), 0.053305)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    near(gram_differences(STUDENT @ turn, STUDENT), 0.0)
    near(gram_differences(STUDENT * torch.tensor([1.0, 2, 3, 4])[:, None], STUDENT), 0.0)


def test_equal_patches_have_no_loss_and_no_gradient_and_constant_ones_are_finite() -> None:
    own = TARGET.clone().requires_grad_()
    value = gram_differences(own, TARGET)
    value.sum().backward()
    assert value.item() == 0 and own.grad is not None and not own.grad.any()
    blank = torch.zeros(1, 4, 3, requires_grad=True)
    gram_differences(blank, TARGET).sum().backward()
    assert blank.grad is not None and blank.grad.isfinite().all()


def test_golden_numbers_of_two_images_by_level() -> None:
    students = torch.cat([STUDENT, STUDENT.flip(1)])
    targets = torch.cat([TARGET, TARGET.roll(1, 1)])
    order = torch.tensor([2, 0, 3, 1])
    for level, number in (("image", 0.098724), ("batch", 0.102381)):
        loss = Case(("gram",), options={"gram": {"level": level}}).build().objectives["gram"]
        assert isinstance(loss, GramAnchor)
        none = torch.zeros(2, 0, 3)
        near(loss._difference(Pair(students, targets, none, none, torch.ones(2, 1))), number)
        turned = Pair(students[:, order], targets[:, order], none, none, torch.ones(2, 1))
        near(loss._difference(turned), number)
        more = [torch.cat([each, torch.randn(1, 4, 3)]) for each in (students, targets)]
        weight = torch.tensor([[1.0], [1.0], [0.0]])
        kept = loss._difference(Pair(more[0], more[1], none, none, weight))
        near(kept, number if level == "batch" else number * 2 / 3)
