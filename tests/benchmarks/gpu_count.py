"""``gpu_report.py --count``: what a step of every method moves and computes, without a GPU.

Eager operators and fused kernels grow linearly with the blocks of the encoder. So steps of two and
of three blocks are counted, and continued to the encoder's own depth.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from pospre.nn.sizes import SIZES
from pospre.planning.fake import FakeTraining, trace_step
from pospre.planning.gpus import EFFICIENCY, GIGA, GPUS
from pospre.planning.kernels import StepTrace, floor_seconds
from pospre.recipe.recipe import Recipe, load_recipe
from tests.benchmarks.gpu_loop import loop_ms

ROOT = Path(__file__).parents[2]
CROPS = ("dinov2", "intertwined")  # ten views an image
SHOWN = ("a100-80", "h100", "h200", "b200")
_BATCH, _LARGE = 256, {"vitl16": 128}
_DEPTHS = 2, 3

Figures = dict[str, float]
"""Of one step, by name: see ``at_depth``."""


def batch_of(method: str, size: str) -> int:
    """Return the images of a step on one GPU."""
    return _LARGE.get(size, _BATCH) // (4 if method in CROPS else 1)


def counted(method: str, size: str, batch: int, overrides: Sequence[str] = ()) -> Figures:
    """Return the figures of a method's step in bf16, see ``at_depth``."""
    depth = recipe_of(method, size, overrides).encoder.depth or SIZES[size].depth
    return at_own_depth(lambda few: at_depth(method, size, batch, few, overrides), depth)


def at_own_depth(figures: Callable[[int], Figures], depth: int) -> Figures:
    """Return the figures of an encoder of ``depth`` blocks, from those of two and of three."""
    few, more = map(figures, _DEPTHS)
    return {name: few[name] + (depth - _DEPTHS[0]) * (more[name] - few[name]) for name in few}


def at_depth(
    method: str, size: str, batch: int, depth: int, overrides: Sequence[str] = ()
) -> Figures:
    """Return the figures of a step with an encoder of so many blocks.

    ``graphs``, ``breaks``, ``symbolic``: of the compiled step. ``operators``, ``casts``, ``items``:
    of the eager one. ``kernels``: of the compiled one and the update. ``eager`` and ``fused``: the
    bytes of both. ``flops`` and ``fused flops``. ``eager h100`` and so on: the least seconds on
    each GPU.
    """
    recipe = recipe_of(method, size, [*overrides, f"encoder.depth={depth}"])
    work, update = traced(recipe, batch)
    from tests.benchmarks.gpu_fused import fused  # late: Inductor takes seconds to import

    compiled = fused(recipe, batch)
    eager, kernels = ([*part, *update.kernels] for part in (work.kernels, compiled.kernels))
    return {
        "graphs": compiled.graphs,
        "breaks": compiled.breaks,
        "symbolic": compiled.symbolic,
        "operators": len(eager),
        "casts": work.casts + update.casts,
        "items": work.items + update.items,
        "kernels": len(kernels),
        "eager": sum(one.bytes for one in eager),
        "fused": sum(one.bytes for one in kernels),
        "flops": work.flops,
        "fused flops": sum(one.flops for one in compiled.kernels),
        **{f"eager {name}": floor_seconds(eager, GPUS[name]) for name in SHOWN},
        **{f"fused {name}": floor_seconds(kernels, GPUS[name]) for name in SHOWN},
    }


def traced(recipe: Recipe, samples: int) -> tuple[StepTrace, StepTrace]:
    """Return what ``trace_step`` does of a step over so many samples."""
    training = FakeTraining(recipe)
    training.begin()
    return trace_step(training, training.batch(samples))


def recipe_of(method: str, size: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a method at a size, in bf16."""
    given = [f"encoder.name={size}", "trainer.precision=amp_bf16", *overrides]
    return load_recipe(ROOT / f"yamls/pretrain/{method}_vitb16.yaml", given)


def print_table(
    methods: Sequence[str], sizes: Sequence[str], batch: int | None, overrides: Sequence[str]
) -> None:
    """Print a line of Markdown for every method and size, as soon as it is counted."""
    print("Counted; nothing was measured. →: from the eager step to the compiled one.")
    print("Floor: images/s by bandwidth and peak, on an H100. Predicted:", EFFICIENCY, "of it.")
    print(f"The trainer's loop takes {loop_ms():.1f} ms of this CPU around a step.\n", flush=True)
    rates = " | ".join(f"predicted, {name}" for name in SHOWN)
    print("| method | size | batch | graphs, breaks, symbolic sizes | operators → kernels ", end="")
    print(f"| GB | casts | `.item()` | GFLOPs | floor | {rates} |")
    print("|---" * (10 + len(SHOWN)) + "|")
    for size in sizes:
        for method in methods:
            images = batch or batch_of(method, size)
            print(_row(method, size, images, counted(method, size, images, overrides)), flush=True)


def _row(method: str, size: str, batch: int, step: Figures) -> str:
    cells = [method, size, str(batch)]
    cells.append(", ".join(f"{step[name]:.0f}" for name in ("graphs", "breaks", "symbolic")))
    cells.append(f"{step['operators']:.0f} → {step['kernels']:.0f}")
    cells.append(f"{step['eager'] / GIGA:.1f} → {step['fused'] / GIGA:.1f}")
    cells += [f"{step['casts']:.0f}", f"{step['items']:.0f}", f"{step['flops'] / batch / GIGA:.1f}"]
    cells.append(f"{batch / step['eager h100']:.0f} → {batch / step['fused h100']:.0f}")
    cells += [f"{EFFICIENCY * batch / step[f'fused {name}']:.0f}" for name in SHOWN]
    return f"| {' | '.join(cells)} |"
