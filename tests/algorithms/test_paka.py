"""PaKA: the golden numbers, and what it is blind to."""

import pytest
import torch

from pospre.algorithms.paka import alignments
from tests.algorithms.test_gram import STUDENT, TARGET


def test_golden_numbers() -> None:
    lengths = torch.tensor([1.0, 2, 3, 4])[:, None]
    for student, target, number in (
        (STUDENT, TARGET, 0.286839),
        (STUDENT * lengths, STUDENT, 0.188031),
        (STUDENT + 1, STUDENT, 0.0),
        (7 * STUDENT, STUDENT, 0.0),
        (torch.ones(1, 4, 3), TARGET, 1.0),
    ):
        found = 1 - alignments(student, target).item()
        assert found == pytest.approx(number, abs=1e-6)


def test_equal_patches_and_constant_ones_have_finite_gradients() -> None:
    own = TARGET.clone().requires_grad_()
    value = 1 - alignments(own, TARGET)
    value.sum().backward()
    assert own.grad is not None and own.grad.abs().max() < 1e-6
    blank = torch.zeros(1, 4, 3, requires_grad=True)
    alignments(blank, TARGET).sum().backward()
    assert blank.grad is not None and blank.grad.isfinite().all()
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        alignments(STUDENT[:, order], TARGET[:, order]), alignments(STUDENT, TARGET)
    )
