"""What operators move and compute, which of them share a kernel, and the least time of kernels."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pospre.planning.gpus import GIGA, GPUS
from pospre.planning.kernels import Kernel, StepTrace, floor_seconds, fused
from tests.benchmarks.gpu_count import at_own_depth, recipe_of, traced

FIGURES = (Path(__file__).parents[1] / "benchmarks/README.md").read_text(encoding="utf-8")
ROWS = 8  # of 4 numbers of 4 bytes


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
    in_fp32 = Kernel(0, 67_000, True)
    for kernel in (moves, computes, in_fp32):
        assert floor_seconds([kernel], gpu) == pytest.approx(1e-9)
    assert floor_seconds([moves, computes], gpu) == pytest.approx(2e-9)


def begun() -> tuple[StepTrace, torch.Tensor]:
    return StepTrace(), torch.zeros(ROWS, 4)


def test_operators_between_two_products_are_one_kernel() -> None:
    trace, values = begun()
    weight = torch.zeros(4, 4)
    with trace:
        entered = torch.relu(values + 1) * 2
        F.softmax(F.layer_norm(entered @ weight, (4,)) + entered, -1)
    before, product, after = fused(trace.operators)
    assert before == Kernel(2 * 128, 0, True)
    assert product == Kernel(2 * 128 + 64, 2 * ROWS * 4 * 4, True)
    assert after.bytes == 3 * 128 + 2 * 4 * ROWS  # and the norm's mean and deviation


def test_a_reduction_over_rows_computes_again_what_is_not_in_memory() -> None:
    trace, values = begun()
    with trace:
        larger = values.bfloat16().float() + 1
        (larger * 2).exp()
        larger.sum(0)
    pointwise, rows = fused(trace.operators)
    assert pointwise.bytes == 2 * 128 and rows.bytes == 128 + 16


def test_what_is_looked_up_is_in_memory() -> None:
    trace, values = begun()
    index = torch.zeros(ROWS, dtype=torch.int64)
    with trace:
        (values + 1)[index] * 2
    made, looked_up = fused(trace.operators)
    assert made.bytes == 2 * 128 and looked_up.bytes == 2 * 128 + 8 * ROWS


def test_gradients_of_a_norm_are_two_kernels() -> None:
    trace, values = begun()
    norm = torch.nn.LayerNorm(4)
    made = norm(values.requires_grad_())
    given = torch.zeros_like(made)
    with trace:
        torch.autograd.grad(made, (values, *norm.parameters()), given)
    entered, weights = fused(trace.operators)
    assert entered.bytes == 3 * 128 + 2 * 4 * ROWS + 2 * 16 and weights.bytes == 2 * 128 + 2 * 16


@pytest.mark.parametrize(
    ("method", "name", "most"),
    [
        ("mae", "MAE", 96),
        ("droppos", "DropPos", 80),
        ("mp3", "MP3", 150),
        ("dinov2", "DINOv2", 175),
    ],
)
def test_bytes_are_near_those_of_inductors_kernels(method: str, name: str, most: float) -> None:
    """As ``make gpu-count`` has printed them, and they stand in the README."""
    found = re.search(rf"^\| {name}, (\d+) \|.*? → ([\d.]+) \| \d+ → \d+ \|", FIGURES, re.M)
    assert found is not None
    images, counted = int(found[1]), float(found[2])

    def gigabytes(depth: int) -> dict[str, float]:
        work, update = traced(recipe_of(method, "vitb16", [f"encoder.depth={depth}"]), images)
        kernels = [*fused(work.operators), *update.kernels]
        return {"fused": sum(kernel.bytes for kernel in kernels) / GIGA}

    moved = at_own_depth(gigabytes, 12)["fused"]
    assert moved == pytest.approx(counted, rel=0.08) and moved <= most
