"""Time and memory of a training step of each method, compared with a peer.

    make bench-methods                                            # ViT-S, batch 16, fp32
    make bench-methods ARGS="--size vitb16 --precision bf16 --batch 64 --output methods.json"
    make bench-methods ARGS="--rows mp3 lut"                      # some of them

A step is drawing the masks, forward, backward, AdamW and the teacher. Each row times two steps in
turn (ours, peer, ours, …), so that a machine whose speed drifts favours neither, and gives the
median of the ratios. Plain peers are plain implementations of the published steps
(``plain_steps.py``, ``plain_hosts.py``). FLOPs are counted, not timed. Peak memory is a process's
own, minus that of an idle one; on a GPU the allocator's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pospre.algorithms.droppos import smoothed_labels
from pospre.augment.device import IMAGENET_MEAN, IMAGENET_STD
from pospre.data.views.options import ViewGroup
from pospre.model.algorithm import Progress, algorithm_class
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.grid import grid_distances
from pospre.nn.sizes import SIZES
from pospre.output import markdown_row, markdown_table
from pospre.planning import kernels as planned
from tests.benchmarks import plain_hosts, plain_steps
from tests.benchmarks.loader_worker import memory

Step = Callable[[], None]
Algorithms = dict[str, dict[str, Any]]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
PROTOTYPES = 4096
MP3_RATIOS = (0.0, 0.3, 0.5, 0.75, 0.9)
MAE_RATIOS = (0.5, 0.9)
LEARNED = {"positions": "learned"}

OURS: dict[str, tuple[Algorithms, dict[str, Any]]] = {
    "mae": ({"mae": {}}, {}),
    "simmim": ({"simmim": {}}, {}),
    "ijepa": ({"ijepa": {}}, {}),
    "dinov2": ({"dinov2": {"num_prototypes": PROTOTYPES}}, LEARNED),
    "supervised": ({"supervised": {"num_classes": 1000}}, {}),
    "droppos": ({"droppos": {}}, {}),
    "droppos, affinity of visible patches": ({"droppos": {"affinity": "visible"}}, {}),
    "droppos, no affinity": ({"droppos": {"temperature": None}}, {}),
    **{f"mae, η = {ratio}": ({"mae": {"mask_ratio": ratio}}, {}) for ratio in MAE_RATIOS},
    **{
        f"mp3, η = {ratio}": ({"mp3": {"mask_ratio": ratio}}, {"positions": "none"})
        for ratio in MP3_RATIOS
    },
    "stop": ({"ijepa": {}, "stop": {}}, {}),
    "lut, paper": ({"mae": {}, "lut": {}}, {}),
    "lut, code": ({"mae": {}, "lut": {"symmetric": True}}, {}),
    "intertwined": (
        {
            "dinov2": {"num_prototypes": PROTOTYPES, "separate_heads": True},
            "crop_field": {},
            "masked_position": {},
        },
        LEARNED,
    ),
    "dinov2, separate heads": (
        {"dinov2": {"num_prototypes": PROTOTYPES, "separate_heads": True}},
        LEARNED,
    ),
}


@dataclass(frozen=True)
class Row:
    """One line of the table: our step beside another one."""

    name: str
    peer: str
    target: str


ROWS = [
    *(
        Row(name, f"plain {name}", "≤ 1.0")
        for name in ("mae", "simmim", "ijepa", "dinov2", "supervised")
    ),
    Row("droppos", "plain droppos", "≤ 1.0"),
    Row("droppos", "mae", "≤ 1.1"),
    Row("droppos, affinity of visible patches", "mae", ""),
    Row("droppos, no affinity", "mae", "≤ 0.55"),
    *(
        Row(f"mp3, η = {ratio}", "mae", "≤ 1.0" if ratio == 0.75 else "falling")
        for ratio in MP3_RATIOS
    ),
    *(Row(f"mp3, η = {ratio}", f"mae, η = {ratio}", "") for ratio in MAE_RATIOS),
    Row("mp3, η = 0.75", "supervised", ""),
    Row("stop", "ijepa", "≤ 1.02"),
    Row("lut, paper", "mae", "≤ 1.7 (FLOPs)"),
    Row("lut, code", "mae", ""),
    Row("intertwined", "dinov2, separate heads", "≤ 1.3"),
]


def views_of(name: str) -> dict[str, ViewGroup]:
    if "dinov2" in OURS[name][0]:
        return {
            "global": ViewGroup(name="global", count=2, size=224),
            "local": ViewGroup(name="local", count=8, size=96),
        }
    groups = {"view": ViewGroup(size=224)}
    if "lut" in OURS[name][0]:
        groups["second"] = ViewGroup(name="second", size=224)
    return groups


def make_batch(
    views: dict[str, ViewGroup], size: int, device: str, *, channels: int = 3
) -> dict[str, Tensor]:
    batch = {
        "index": torch.arange(size),
        "epoch": torch.zeros(size, dtype=torch.int64),
        "label": torch.arange(size),
    }
    for name, group in views.items():
        shape = (size, group.count, channels, *group.shape)
        batch[f"{name}/image"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        batch[f"{name}/flip"] = torch.rand(size, group.count) < 0.5
        corner = torch.rand(size, group.count, 2) * 0.5
        batch[f"{name}/box"] = torch.cat([corner, corner + 0.4], dim=-1)
    return {key: value.to(device) for key, value in batch.items()}


def training_step(
    model: nn.Module, loss: Callable[[], Tensor], precision: str, device: str
) -> Step:
    """Return a function that does one whole training step of ``model``."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    dtype = PRECISIONS[precision]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            value = loss()
        value.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def build_ours(name: str, size: str, device: str) -> PretrainModel:
    algorithms, encoder = OURS[name]
    made = [algorithm_class(key)(**options) for key, options in algorithms.items()]
    model = PretrainModel(build_encoder(size, **encoder), made, seed=0, views=views_of(name))
    return model.to(device).train()


def ours(name: str, size: str, num: int, precision: str, device: str) -> Step:
    """Return our training step, with masks, flips, normalisation and the teacher."""
    model = build_ours(name, size, device)
    batch = make_batch(model.views, num, device)
    progress = Progress(0.5, 0.5)

    def loss() -> Tensor:
        model.prepare(batch, progress)
        return model.loss(model(batch), batch)["total"]

    step = training_step(model, loss, precision, device)

    def whole() -> None:
        step()
        model.after_step(progress)

    return whole


def plain(name: str, size: str, num: int, precision: str, device: str) -> Step:
    """Return the published step, on pixels that it normalises on the device, as ours does."""
    if device != "cpu":
        raise SystemExit("the plain peers draw their masks on the CPU; run this row there")
    images, shape = pixels(num, 224), SIZES[size]
    model: nn.Module
    if name == "dinov2":
        model = plain_hosts.PlainDINOv2(shape, prototypes=PROTOTYPES)
        arguments: tuple[Tensor, ...] = (pixels(2 * num, 224), pixels(8 * num, 96))
    elif name == "supervised":
        model, arguments = plain_hosts.PlainSupervised(shape), (images, torch.arange(num))
    elif name == "ijepa":
        context, target = _ijepa_counts(size)
        model = plain_hosts.PlainIJEPA(shape, context=context, target=target)
        arguments = (images,)
    elif name == "droppos":
        smooth = smoothed_labels(
            grid_distances(14, 14, squared=True), torch.tensor(1.0), official=True
        )
        model, arguments = plain_steps.PlainDropPos(shape, affinity=True), (images, smooth)
    else:
        makers = {"mae": plain_steps.PlainMAE, "simmim": plain_hosts.PlainSimMIM}
        model, arguments = makers[name](shape), (images,)

    def loss() -> Tensor:
        return model(*(normalised(one) if one.dtype == torch.uint8 else one for one in arguments))

    return training_step(model, loss, precision, device)


def pixels(num: int, side: int) -> Tensor:
    return torch.randint(0, 256, (num, 3, side, side), dtype=torch.uint8)


def normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(some).view(3, 1, 1) for some in (IMAGENET_MEAN, IMAGENET_STD))
    return (images.float() / 255 - mean) / std


def _ijepa_counts(size: str) -> tuple[int, int]:
    """Return how many tokens our I-JEPA's context and each of its target blocks have."""
    model = build_ours("ijepa", size, "cpu")
    batch = model.prepare(make_batch(model.views, 1, "cpu"), 0.0)
    return batch["view/visible"].shape[1], batch["ijepa/targets"].shape[2]


def make_step(name: str, *settings: Any) -> Step:
    """Return the step of that name: one of ours, or ``plain …``."""
    if name.startswith("plain "):
        return plain(name.removeprefix("plain "), *settings)
    return ours(name, *settings)


def measure(first: Step, second: Step, steps: int) -> tuple[list[float], list[float]]:
    """Time two steps in turn; the first of each warms up and does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(steps + 1):
        for kept, step in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            step()
            if number:
                kept.append(time.perf_counter() - start)
    return times


@cache
def count_flops(name: str, size: str) -> float:
    """Return the FLOPs of forward and backward per image."""
    model = build_ours(name, size, "cpu")
    batch = model.prepare(make_batch(model.views, 2, "cpu"), 0.0)
    return planned.count_flops(lambda: model.loss(model(batch), batch)["total"].backward()) / 2


@cache
def peak_bytes(name: str, size: str, batch: int, precision: str) -> float:
    """Return the peak memory of a process that does two steps."""
    command = [sys.executable, __file__, "--size", size, "--batch", str(batch)]
    command += ["--precision", precision, "--peak-of", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_memory(name: str, options: argparse.Namespace) -> float:
    """Return the peak of a process that does two steps, minus an idle one's, in GiB."""
    settings = (options.size, options.batch, options.precision)
    return (peak_bytes(name, *settings) - peak_bytes("nothing", *settings)) / 2**30


def print_peak(name: str, settings: tuple[Any, ...]) -> None:
    """Do two steps and print this process's peak memory in bytes."""
    if name != "nothing":
        step = make_step(name, *settings)
        step()
        step()
    if settings[-1] == "cuda":
        print(torch.cuda.max_memory_allocated())
        return
    print(memory()[1])


def main() -> int:
    """Print the table; write JSON with --output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="vits16", choices=sorted(SIZES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of the rows' names")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = (options.size, options.batch, options.precision, device)
    torch.manual_seed(0)
    if options.peak_of:
        print_peak(options.peak_of, settings)
        return 0
    print(f"{options.size}, batch {options.batch}, {options.precision}, {device}, ", end="")
    print(f"medians of {options.steps} steps in turn\n")
    header = [
        "step",
        "beside",
        "time",
        "target",
        "GFLOPs per image",
        "ratio",
        "GiB, ours",
        "GiB, peer",
    ]
    print(markdown_table(header, []))
    results = [
        measure_row(row, options, settings)
        for row in ROWS
        if row.name.startswith(tuple(options.rows))
    ]
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    return 0


def measure_row(row: Row, options: argparse.Namespace, settings: tuple[Any, ...]) -> dict[str, Any]:
    times = measure(make_step(row.name, *settings), make_step(row.peer, *settings), options.steps)
    result: dict[str, Any] = {
        "step": row.name,
        "beside": row.peer,
        "target": row.target,
        "seconds": [statistics.median(part) for part in times],
        "time_ratio": statistics.median(a / b for a, b in zip(*times, strict=True)),
        "gib": [peak_memory(name, options) for name in (row.name, row.peer)],
    }
    flops = [f"{count_flops(row.name, options.size) / 1e9:.1f}", "–"]
    if row.peer in OURS:
        pair = [count_flops(name, options.size) for name in (row.name, row.peer)]
        result["flops"] = pair
        flops = [f"{pair[0] / 1e9:.1f}", f"{pair[0] / pair[1]:.2f}"]
    spent = [f"{result['time_ratio']:.2f}", str(row.target)]
    memory = [f"{value:.2f}" for value in result["gib"]]
    print(markdown_row([row.name, row.peer, *spent, *flops, *memory]), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
