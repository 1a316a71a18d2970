"""What GPUs were measured to do, and what was predicted: read from ``gpu_figures.json``.

The key of a step is ``<recipe of yamls/pretrain> <encoder> <images on a GPU>``. Its floor is the
images/s that bandwidth and FLOPs allow, counted for a setting of the trainer and a GPU.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gpu_figures.json")
EAGER, COMPILED = "eager", "compiled"
_ENOUGH = 4  # methods for a median


@dataclass(frozen=True)
class Figure:
    """One measurement on one GPU."""

    step: str
    algorithms: list[str]
    encoder: str
    setting: str
    loop: str  # ``trainer``, ``trainer and loader`` or ``plain``
    images_per_s: float
    gpu: str  # in ``GPUS``
    card: str  # as its driver calls it
    date: str
    revision: str
    predicted: float | None = None  # before it was measured, images/s
    gib: float | None = None  # the peak of torch's allocator
    first_step: float | None = None  # seconds, with compiling
    spread: list[float] | None = None  # the slowest and the fastest window, images/s
    note: str = ""


@cache
def content() -> dict[str, Any]:
    """Return the file: ``counted`` by step, and ``measured``."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def measured() -> list[Figure]:
    """Return all measurements, later ones last."""
    return [Figure(**line) for line in content()["measured"]]


def of(algorithms: Sequence[str], encoder: str, gpu: str | None) -> list[Figure]:
    """Return the newest measurement of a method in each setting and loop, the fastest first."""
    newest = {
        (one.step, one.setting, one.loop): one
        for one in measured()
        if one.algorithms == [*algorithms] and one.encoder == encoder and one.gpu == gpu
    }
    return sorted(newest.values(), key=lambda one: -one.images_per_s)


def counted(step: str) -> dict[str, Any]:
    """Return what is counted of a step: ``floors`` by setting and GPU, ``gflops`` of an image."""
    return content()["counted"].get(step, {})


def floor(step: str, setting: str, gpu: str | None) -> float | None:
    """Return the images/s that a GPU allows at most; None: not counted."""
    floors: dict[str, dict[str, float]] = counted(step).get("floors", {})
    # the kernel that computes attention moves the same
    return floors.get(setting.removesuffix(", cuDNN"), {}).get(gpu or "")


def predicted(step: str, setting: str, gpu: str | None) -> float | None:
    """Return the images/s that are expected of a GPU; None: not counted."""
    least = floor(step, setting, gpu)
    return None if least is None else efficiency() * least


@cache
def efficiency() -> float:
    """Return the share of the floor's images/s that a step reaches: the median of the methods.

    The newest measurement of each method at ViT-B counts: of the compiled step in the trainer, as
    soon as a few methods have one, until then of the eager step in any loop.
    """
    shares: dict[str, dict[str, float]] = {COMPILED: {}, EAGER: {}}
    for one in measured():
        least = floor(one.step, one.setting, one.gpu)
        counts = one.setting == EAGER or (one.setting == COMPILED and one.loop == "trainer")
        if least is not None and counts and one.encoder == "vitb16":
            shares[one.setting][one.step] = one.images_per_s / least
    enough = len(shares[COMPILED]) >= _ENOUGH
    return round(statistics.median(shares[COMPILED if enough else EAGER].values()), 2)
