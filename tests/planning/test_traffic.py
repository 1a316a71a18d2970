"""What operators move and compute, and how much a step of a method may."""

import pytest
import torch

from pospre.planning.gpus import GIGA, GPUS
from pospre.planning.traffic import Kernel, Traffic, floor_seconds
from tests.benchmarks.gpu_count import Figures, at_depth


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


def small(method: str, depth: int) -> Figures:
    """Return the figures of ViT-S with few blocks, a decoder of one, 64 images."""
    given = ["algorithms.mae.decoder_depth=1"] if method == "mae" else []
    return at_depth(method, "vits16", 64, depth, given)


@pytest.fixture(scope="module")
def mae() -> dict[int, Figures]:
    return {depth: small("mae", depth) for depth in (1, 2, 3)}


def test_figures_grow_linearly_with_the_blocks(mae: dict[int, Figures]) -> None:
    for name, at_three in mae[3].items():
        assert 2 * mae[2][name] - mae[1][name] == pytest.approx(at_three, rel=2e-3), name


def test_fused_kernels_compute_what_eager_operators_do_and_move_less(
    mae: dict[int, Figures],
) -> None:
    step = mae[2]
    assert step["fused flops"] == pytest.approx(step["flops"], rel=0.01)
    assert step["fused"] < 0.9 * step["eager"] and step["kernels"] < step["operators"]


@pytest.mark.parametrize(
    ("method", "eager", "compiled", "operators", "kernels", "casts"),
    [("mae", 5.28, 3.4, 252, 196, 92), ("droppos", 4.25, 3.03, 351, 265, 112)],
)
def test_a_step_moves_no_more_than_it_did(
    mae: dict[int, Figures],
    method: str,
    eager: float,
    compiled: float,
    operators: int,
    kernels: int,
    casts: int,
) -> None:
    """A change that lowers a figure lowers its ceiling here."""
    step = mae[2] if method == "mae" else small(method, 2)
    assert (step["graphs"], step["breaks"], step["symbolic"], step["items"]) == (1, 0, 0, 0)
    assert step["eager"] <= eager * GIGA and step["fused"] <= compiled * GIGA
    assert step["operators"] <= operators and step["kernels"] <= kernels
    assert step["casts"] <= casts
