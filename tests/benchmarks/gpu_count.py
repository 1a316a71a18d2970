"""``gpu_report.py --count``: what a step of every method moves and computes, without a GPU."""

from collections.abc import Sequence
from pathlib import Path

from pospre.planning.gpus import GIGA, GPUS
from pospre.planning.traffic import Traffic, count_step, floor_seconds
from pospre.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
CROPS = ("dinov2", "intertwined")  # ten views an image
SHOWN = ("a100-80", "h100", "h200", "b200")
_BATCH, _LARGE = 256, {"vitl16": 128}


def batch_of(method: str, size: str) -> int:
    """Return the images of a step on one GPU."""
    return _LARGE.get(size, _BATCH) // (4 if method in CROPS else 1)


def counted(method: str, size: str, batch: int, overrides: Sequence[str] = ()) -> Traffic:
    """Return what an eager step of a method in bf16 moves and computes."""
    given = [f"encoder.name={size}", "trainer.precision=amp_bf16", *overrides]
    return count_step(load_recipe(ROOT / f"yamls/pretrain/{method}_vitb16.yaml", given), batch)


def print_table(
    methods: Sequence[str], sizes: Sequence[str], batch: int | None, overrides: Sequence[str]
) -> None:
    """Print a line of Markdown for every method and size, as soon as it is counted."""
    rates = " | ".join(f"estimate, {name}" for name in SHOWN)
    print("Eager steps, counted. Estimates: images/s by bandwidth and peak, not measured.\n")
    print(f"| method | size | batch | operators | GB | casts | `.item()` | GFLOPs | {rates} |")
    print("|---" * (8 + len(SHOWN)) + "|")
    for size in sizes:
        for method in methods:
            images = batch or batch_of(method, size)
            print(_row(method, size, images, counted(method, size, images, overrides)), flush=True)


def _row(method: str, size: str, batch: int, step: Traffic) -> str:
    cells = [method, size, str(batch), str(len(step.kernels)), f"{step.bytes / GIGA:.1f}"]
    cells += [str(step.casts), str(step.items), f"{step.flops / batch / GIGA:.1f}"]
    cells += [f"{batch / floor_seconds(step.kernels, GPUS[name]):.0f}" for name in SHOWN]
    return f"| {' | '.join(cells)} |"
