"""What a card does without any method: its ceilings, copies beside computing, and ``auto``."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pospre.planning.gpus import GIB, GIGA, TERA
from tests.benchmarks.gpu_cell import Clock, Turn, recipe_of, synthetic, wait
from tests.benchmarks.gpu_right import fact
from tests.training.fitting import fit

_OVERLAP = 0.8  # of the time that copying and computing take one after the other
_TOO_MANY = 4096  # images for any GPU of today at once
_REPEATS = 20


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def ceilings(asked: dict[str, Any], turn: Turn, folder: Path) -> dict[str, Any]:
    """Measure a copy within the device's memory, and a product in bf16."""
    on_gpu = _device() == "cuda"
    numbers, side = (1 << 30, 8192) if on_gpu else (1 << 20, 128)
    # random: a product of zeros would be faster
    source = torch.randint(0, 1 << 15, (numbers,), dtype=torch.int16, device=_device())
    target = torch.empty_like(source)
    one, other = (torch.randn(side, side, device=_device(), dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(one)
    work: list[Callable[[], object]] = [
        lambda: target.copy_(source),
        lambda: torch.mm(one, other, out=product),
    ]
    for each in work:
        each()
    wait()
    turn()
    copy, multiply = map(_seconds, work)
    return {
        "copy_gb_per_s": 2 * source.nbytes / copy / GIGA,
        "bf16_tflops": 2 * side**3 / multiply / TERA,
    }


def _seconds(work: Callable[[], object]) -> float:
    """Return the median of the seconds that a device takes for something."""
    clock = Clock()
    for number in range(_REPEATS + 3):
        work()
        if number > 1:
            clock.mark()
    return statistics.median(clock.windows())


def overlap(asked: dict[str, Any], turn: Turn, folder: Path) -> dict[str, Any]:
    """Try whether images in pinned memory are copied while the GPU computes."""
    what = f"copies from pinned memory take place beside computing, in ≤ {_OVERLAP:.0%} of the time"
    if _device() == "cpu":
        turn()
        return {"facts": [fact(what, None, "needs a GPU")]}
    images = torch.empty(256, 3, 224, 224, dtype=torch.uint8).pin_memory()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def copy() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                images.to("cuda", non_blocking=True)

    def compute() -> None:
        for _ in range(20):
            matrix @ matrix

    def both(*parts: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            for part in parts:
                part()
            torch.cuda.current_stream().wait_stream(side)

        return work

    both(copy, compute)()
    turn()
    beside, *each = (_seconds(both(*parts)) for parts in ((copy, compute), (copy,), (compute,)))
    share = beside / sum(each)
    return {"facts": [fact(what, share <= _OVERLAP, f"{share:.0%}")]}


def auto(asked: dict[str, Any], turn: Turn, folder: Path) -> dict[str, Any]:
    """Try whether ``trainer.microbatch_size: auto`` finds what fits, and the training does fit."""
    what = "trainer.microbatch_size: auto finds what fits of too large a batch, and trains"
    size = _TOO_MANY if _device() == "cuda" else asked["images"]
    more = ["trainer.microbatch_size=auto", "trainer.compile=false"]
    run = synthetic(recipe_of({**asked, "images": size}, folder, *more))
    found = fit(run).state.device_train_microbatch_size
    if found == size:
        return {"facts": [fact(what, None, f"all {size} fit")]}
    peak = torch.cuda.max_memory_allocated() / GIB
    return {"facts": [fact(what, True, f"{found} of {size} at a time, {peak:.1f} GiB")]}
