"""The error of a plan: predicted and measured FLOPs and memory of a step.

    make check-plan                                              # ViT-S, batch 8, fp32
    make check-plan ARGS="--precision bf16 --methods mae dinov2"

Predicted over fake tensors by ``pospre.planning``. FLOPs are counted on real tensors. Memory is
measured twice: what torch had allocated at most, and the peak of a process that does two steps,
beyond an idle one's (``bench_methods.py``): what the allocator could not give back is in there.
"""

import argparse
import subprocess
import sys
from typing import Any

from torch.profiler import ProfilerActivity, profile

from pospre.output import markdown_row, markdown_table
from pospre.planning.counts import count
from pospre.planning.gpus import GIB, GIGA, Assumptions
from pospre.planning.layouts import Held, Layout
from pospre.recipe.recipe import Recipe, recipe_from_dict
from tests.benchmarks.bench_methods import OURS, count_flops, make_step, peak_memory, views_of

METHODS = (
    *("mae", "simmim", "ijepa", "dinov2", "supervised", "droppos", "mp3, η = 0.75", "stop"),
    *("lut, paper", "lut, code", "intertwined"),
)
_HEADER = ("step", "GFLOPs, plan", "counted", "error", "GiB, plan", "allocated", "error", "process",
           "error")  # fmt: skip
_PRECISIONS = {"fp32": "fp32", "bf16": "amp_bf16"}


def recipe_of(name: str, options: argparse.Namespace) -> Recipe:
    """Return a step of ``bench_methods`` as a recipe."""
    algorithms, encoder = OURS[name]
    views = {
        key: {"count": group.count, "size": group.size} for key, group in views_of(name).items()
    }
    data: dict[str, Any] = {
        "run_name": "plan",
        "data": {"path": "nowhere", "batch_size": options.batch, "views": views},
        "encoder": {"name": options.size, **encoder},
        "algorithms": algorithms,
        "trainer": {"max_duration": "1ep", "precision": _PRECISIONS[options.precision]},
    }
    return recipe_from_dict(data)


def predicted(recipe: Recipe) -> tuple[float, Held]:
    """Return FLOPs per image, and what one device holds without what a GPU takes besides."""
    counts, batch = count(recipe), recipe.data.batch_size
    step, assumed = counts.steps[False], Assumptions(fragmentation=0.0, reserve_gib=0.0)
    layout = Layout("one", 1, 1)
    held = layout.held(counts, step.memory, assumed, microbatch=batch, device_batch=batch)
    return step.flops, held


def allocated(name: str, options: argparse.Namespace) -> float:
    """Return the most GiB that torch has had from its allocator, in a process of its own."""
    command = [sys.executable, __file__, "--size", options.size, "--batch", str(options.batch)]
    command += ["--precision", options.precision, "--allocated-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) / GIB


def print_allocated(name: str, options: argparse.Namespace) -> None:
    """Do two steps and print the most bytes that tensors have had."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make_step(name, options.size, options.batch, options.precision, "cpu")
        step()
        step()
    held = most = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    print(most)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="vits16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", default="fp32", choices=_PRECISIONS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--allocated-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.allocated_of:
        print_allocated(options.allocated_of, options)
        return 0
    print(markdown_table(_HEADER, []))
    for name in options.methods:
        flops, held = predicted(recipe_of(name, options))
        planned, counted = held.total / GIB, count_flops(name, options.size)
        cells = [f"{flops / GIGA:.1f}", f"{counted / GIGA:.1f}", _error(flops, counted)]
        cells.append(f"{planned:.2f}")
        for measured in (allocated(name, options), peak_memory(name, options)):
            cells += [f"{measured:.2f}", _error(planned, measured)]
        print(markdown_row([name, *cells]), flush=True)
    return 0


def _error(planned: float, measured: float) -> str:
    return f"{100 * (planned / measured - 1):+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
