"""What a step of every method moves and computes, counted without a GPU.

    make gpu-count ARGS="--methods mae --sizes vitb16"
    make gpu-count ARGS="--methods mae --set trainer.residual=bf16 --write"    # into the figures

Eager operators and fused kernels grow linearly with the blocks of the encoder. So steps of two and
of three blocks are counted, and continued to the encoder's own depth. ``--write`` keeps the floors
in ``pospre/planning/gpu_figures.json``, from which follows what is predicted.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.core import Callback, State

from pospre.nn.sizes import SIZES
from pospre.output import markdown_row, markdown_table
from pospre.planning import figures
from pospre.planning.gpus import GIGA, GPUS
from pospre.planning.kernels import StepTrace, floor_seconds
from pospre.planning.step_costs import FakeTraining
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.build import Components
from tests.benchmarks import gpu_table
from tests.benchmarks.gpu_cell import synthetic
from tests.benchmarks.gpu_items import METHODS, batch_of, recipe_path
from tests.benchmarks.gpu_items import SIZES as ENCODERS
from tests.training.fitting import fit

HALF = "trainer.residual=bf16"
SHOWN = ("a100-80", "h100", "h200", "b200")
_HEADER = ("method", "size", "batch", "graphs, breaks, symbolic sizes", "operators → kernels", "GB",
           "casts", "`.item()`", "GFLOPs", "floor")  # fmt: skip
_DEPTHS = 2, 3
_TINY = (
    "algorithms={mae: {decoder_dim: 32, decoder_depth: 1, decoder_heads: 2}}",
    "encoder={name: vit_tiny16, depth: 1, image_size: 32}",
    "data.batch_size=2",
    "optimizer.lr_rule=none",
    "schedule.warmup=1ba",
    "schedule.length=null",
    "evaluation={}",
    "trainer.device=cpu",
    "trainer.precision=fp32",
    "trainer.progress_bar=false",
)

Figures = dict[str, float]
"""Of one step, by name: see ``at_depth``."""


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
    """Return the operators of a step over so many samples: of (both passes, the update)."""
    training = FakeTraining(recipe)
    training.begin()
    _, work, update = training.track(training.batch(samples))
    return work, update


def recipe_of(method: str, size: str, overrides: Sequence[str]) -> Recipe:
    given = [f"encoder.name={size}", "trainer.precision=amp_bf16", *overrides]
    return load_recipe(recipe_path(method), given)


def print_table(
    methods: Sequence[str], sizes: Sequence[str], overrides: Sequence[str], *, keep: bool
) -> None:
    """Print a line of Markdown for every method and size, as soon as it is counted; keep floors."""
    print("Counted; nothing was measured. →: from the eager step to the compiled one.")
    share = figures.efficiency()
    print("Floor: images/s by bandwidth and peak, on an H100. Predicted:", share, "of it.")
    print(f"The trainer's loop takes {loop_ms():.1f} ms of this CPU around a step.\n", flush=True)
    print(markdown_table([*_HEADER, *(f"predicted, {name}" for name in SHOWN)], []))
    for size in sizes:
        for method in methods:
            images = batch_of(method, size)
            step = counted(method, size, images, overrides)
            print(_row(method, size, images, step), flush=True)
            if keep:
                _keep(f"{method} {size} {images}", images, step, half=HALF in overrides)


def _keep(name: str, images: int, step: Figures, *, half: bool) -> None:
    """Write the floors of a step into the figures; ``half``: with a bf16 residual."""
    content = figures.content()
    settings = {"fused": f"{figures.COMPILED}, bf16 residual"}
    if not half:
        settings = {"eager": figures.EAGER, "fused": figures.COMPILED}
    floors = {
        setting: {gpu: round(images / step[f"{kind} {gpu}"]) for gpu in SHOWN}
        for kind, setting in settings.items()
    }
    before = content["counted"].get(name, {"floors": {}})
    flops = round(step["flops"] / images / GIGA, 1)
    found = {"gflops": flops, "floors": {**before["floors"], **floors}}
    gpu_table.write({**content["counted"], name: found}, content["measured"])


def _row(method: str, size: str, batch: int, step: Figures) -> str:
    cells = [method, size, str(batch)]
    cells.append(", ".join(f"{step[name]:.0f}" for name in ("graphs", "breaks", "symbolic")))
    cells.append(f"{step['operators']:.0f} → {step['kernels']:.0f}")
    cells.append(f"{step['eager'] / GIGA:.1f} → {step['fused'] / GIGA:.1f}")
    cells += [f"{step['casts']:.0f}", f"{step['items']:.0f}", f"{step['flops'] / batch / GIGA:.1f}"]
    cells.append(f"{batch / step['eager h100']:.0f} → {batch / step['fused h100']:.0f}")
    share = figures.efficiency()
    cells += [f"{share * batch / step[f'fused {name}']:.0f}" for name in SHOWN]
    return markdown_row(cells)


class _Neighbour(Callback):
    """Takes a plain step after each of the trainer's, and notes the difference in CPU seconds."""

    def __init__(self, run: Components) -> None:
        self.run = run
        self.loops: list[float] = []
        self._begun = time.thread_time()

    def batch_end(self, state: State, logger: Any) -> None:
        ended = time.thread_time()
        model, optimizer = self.run.model, self.run.optimizer
        loss = model(next(iter(self.run.loader)), 0.5).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.after_step(0.5)
        now = time.thread_time()
        self.loops.append((ended - self._begun) - (now - ended))
        self._begun = time.thread_time()


def loop_ms(steps: int = 200) -> float:
    """Return the CPU ms that the trainer's loop takes around a step: the median of ``steps``.

    A tiny MAE is trained, whose operators cost little. After each of its steps the same model takes
    a plain step: draws, forward, backward, optimiser. The loop costs what the trainer's step takes
    more. CPU time of the thread is measured, as the machine may be busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pospre-loop-") as folder:
        length = [f"trainer.run_folder={folder}", f"trainer.max_duration={steps + 20}ba"]
        run = synthetic(load_recipe(recipe_path("mae"), [*_TINY, *length]))
        neighbour = _Neighbour(run)
        try:
            fit(run, neighbour)
        finally:
            torch.set_num_threads(threads)
    return 1e3 * statistics.median(neighbour.loops[20:])


def main(argv: Sequence[str] | None = None) -> int:
    """Count steps, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--sizes", nargs="+", default=[*ENCODERS])
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--write", action="store_true", help="keep the floors in the figures")
    options = parser.parse_args(argv)
    print_table(options.methods, options.sizes, options.set, keep=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
