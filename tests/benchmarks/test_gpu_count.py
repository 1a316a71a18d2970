"""What ``make gpu-count`` prints of a step, and how much a step of a method may move."""

import pytest

from pospre.planning.gpus import GIGA
from pospre.planning.kernels import StepTrace, fused
from tests.benchmarks.gpu_count import at_depth, loop_ms, recipe_of, traced

FEW = ["algorithms.mae.decoder_depth=1"]


def eager_step(method: str, depth: int) -> tuple[StepTrace, StepTrace]:
    """Return the step of ViT-S with few blocks, 64 images; MAE's decoder has one."""
    given = [f"encoder.depth={depth}", *(FEW if method == "mae" else [])]
    return traced(recipe_of(method, "vits16", given), 64)


def test_figures_grow_linearly_with_the_blocks() -> None:
    figures = []
    for depth in (1, 2, 3):
        work, update = eager_step("mae", depth)
        both = [*work.kernels, *update.kernels], [*fused(work.operators), *update.kernels]
        figures.append([one for kernels in both for one in map(sum, zip(*kernels, strict=True))])
        figures[-1] += [len(kernels) for kernels in both]
    for one, two, three in zip(*figures, strict=True):
        assert 2 * two - one == pytest.approx(three, rel=2e-3)


def test_fused_kernels_compute_what_eager_operators_do_and_move_less() -> None:
    """A change that lowers a figure lowers its ceiling here."""
    step = at_depth("mae", "vits16", 64, 2, FEW)
    assert (step["graphs"], step["breaks"], step["symbolic"]) == (1, 0, 0)
    assert step["fused flops"] == pytest.approx(step["flops"], rel=0.01)
    assert step["fused"] <= 3.4 * GIGA and step["kernels"] <= 196


@pytest.mark.parametrize(
    ("method", "gigabytes", "operators", "casts"),
    [("mae", 5.28, 252, 92), ("droppos", 4.25, 351, 112), ("mp3", 37.96, 1245, 117)],
)
def test_an_eager_step_moves_no_more_than_it_did(
    method: str, gigabytes: float, operators: int, casts: int
) -> None:
    """A change that lowers a figure lowers its ceiling here."""
    work, update = eager_step(method, 2)
    kernels = [*work.kernels, *update.kernels]
    assert sum(kernel.bytes for kernel in kernels) <= gigabytes * GIGA
    assert len(kernels) <= operators and work.casts + update.casts <= casts
    assert work.items + update.items == 0


def test_the_loop_around_a_step_is_measured() -> None:
    assert 0.1 < loop_ms(steps=20) < 50
