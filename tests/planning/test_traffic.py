"""What operators move and compute, and how much a step of a method may."""

import pytest
import torch

from pospre.planning.gpus import GIGA, GPUS
from pospre.planning.traffic import Kernel, Traffic, floor_seconds
from tests.benchmarks.gpu_count import counted


def test_operators_read_what_they_are_given_and_write_what_they_make() -> None:
    one, other = torch.zeros(8, 4), torch.zeros(4, 2)
    with Traffic() as traffic:
        one.view(4, 8)
        torch.empty(100)
        one.add_(1.0)
        (one @ other).bfloat16()
    product = Kernel(4 * (32 + 8 + 16), 2 * 8 * 4 * 2, True)
    assert traffic.kernels == [Kernel(2 * 128, 0, True), product, Kernel(16 * 6, 0, False)]
    assert (traffic.casts, traffic.items, traffic.flops) == (1, 0, 128)


def test_what_is_expanded_is_there_once_and_values_that_are_waited_for_count() -> None:
    row = torch.zeros(1, 4).expand(8, 4)
    with Traffic() as traffic:
        row.clone().sum().item()
    assert traffic.kernels[0].bytes == 16 + 128 and traffic.items == 1


def test_a_kernel_takes_the_longer_of_its_two_times() -> None:
    gpu = GPUS["h100"]
    moves, computes = Kernel(3350, 1, False), Kernel(1, 989_000, False)
    assert moves.seconds(gpu) == pytest.approx(1e-9) == computes.seconds(gpu)
    assert floor_seconds([moves, computes], gpu) == pytest.approx(2e-9)
    assert Kernel(0, 67_000, True).seconds(gpu) == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("method", "gigabytes", "operators", "casts"),
    [("mae", 21.3, 629, 246), ("droppos", 4.32, 359, 112)],
)
def test_a_step_moves_no_more_than_it_did(
    method: str, gigabytes: float, operators: int, casts: int
) -> None:
    """ViT-S of two blocks, 64 images: who lowers a figure, lowers it here."""
    step = counted(method, "vits16", 64, ["encoder.depth=2"])
    assert step.bytes <= gigabytes * GIGA and len(step.kernels) <= operators
    assert step.casts <= casts and step.items == 0
