"""What operators move and compute, and the least time of it."""

import pytest
import torch

from pospre.planning.gpus import GPUS
from pospre.planning.kernels import Kernel, StepTrace, floor_seconds


def test_operators_read_what_they_are_given_and_write_what_they_make() -> None:
    one, other = torch.zeros(8, 4), torch.zeros(4, 2)
    with StepTrace() as trace:
        one.view(4, 8)
        torch.empty(100)
        one.add_(1.0)
        (one @ other).bfloat16()
    product = Kernel(4 * (32 + 8 + 16), 2 * 8 * 4 * 2, True)
    assert trace.kernels == [Kernel(2 * 128, 0, True), product, Kernel(16 * 6, 0, False)]
    assert (trace.casts, trace.items, trace.flops) == (1, 0, 128)


def test_what_is_expanded_is_there_once_and_values_that_are_waited_for_count() -> None:
    row = torch.zeros(1, 4).expand(8, 4)
    with StepTrace() as trace:
        row.clone().sum().item()
    assert trace.kernels[0].bytes == 16 + 128 and trace.items == 1


def test_a_kernel_takes_the_longer_of_its_two_times() -> None:
    gpu = GPUS["h100"]
    moves, computes = Kernel(3350, 1, False), Kernel(1, 989_000, False)
    assert moves.seconds(gpu) == pytest.approx(1e-9) == computes.seconds(gpu)
    assert floor_seconds([moves, computes], gpu) == pytest.approx(2e-9)
    assert Kernel(0, 67_000, True).seconds(gpu) == pytest.approx(1e-9)
