"""How long a training step takes beside the published step written down plainly.

    make bench-step                                      # ViT-S, batch 32, fp32 and bf16
    make bench-step ARGS="--steps 9 --output step.json"

Both take the same images, sizes, optimiser and fused attention, in turn (ours, plain, ours, …), so
that a machine whose speed drifts does not favour either. A step is forward, backward and AdamW.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from pospre.algorithms.droppos import DropPos
from pospre.algorithms.mae import MAE
from pospre.nn.encoder import SIZES, build_encoder
from pospre.nn.positions import grid_distances, smoothed_labels
from pospre.pretrain.algorithm import PretrainAlgorithm
from pospre.pretrain.model import PretrainModel
from tests.benchmarks.plain_steps import PlainDropPos, PlainMAE

Step = Callable[[], None]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def training_step(
    model: nn.Module, loss: Callable[[], torch.Tensor], precision: str, device: str
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


def ours(algorithm: PretrainAlgorithm, size: str, batch: dict, precision: str, device: str) -> Step:
    """Return our training step, masks, flips and normalisation included."""
    model = PretrainModel(build_encoder(size), seed=0)
    algorithm.attach(model)
    model.to(device).train()

    def loss() -> torch.Tensor:
        algorithm.write(batch, model)
        return model.loss(model(batch), batch)["total"]

    return training_step(model, loss, precision, device)


def plain(case: str, size: str, batch: dict, precision: str, device: str) -> Step:
    """Return the published step, on images that are normalised beforehand."""
    images = PretrainModel(build_encoder(size, depth=1), seed=0).to(device).images(batch)[:, 0]
    images = images.contiguous()
    if case == "mae":
        mae = PlainMAE(SIZES[size]).to(device)
        return training_step(mae, lambda: mae(images), precision, device)
    droppos = PlainDropPos(SIZES[size], affinity=case != "droppos, no affinity").to(device)
    distance = grid_distances(14, 14, squared=True)
    smooth = smoothed_labels(distance, torch.tensor(1.0), official=True).to(device)
    return training_step(droppos, lambda: droppos(images, smooth), precision, device)


CASES: dict[str, Callable[[], PretrainAlgorithm]] = {
    "mae": MAE,
    "droppos": DropPos,
    "droppos, affinity of visible patches": lambda: DropPos(affinity="visible"),
    "droppos, no affinity": lambda: DropPos(temperature=None),
}


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


def main() -> int:
    """Print the table; write JSON with --output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="vits16", choices=sorted(set(SIZES) - {"vith14"}))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    batch = {
        "view/image": torch.randint(0, 256, (options.batch, 1, 3, 224, 224), dtype=torch.uint8),
        "view/flip": torch.rand(options.batch, 1) < 0.5,
        "index": torch.arange(options.batch),
        "epoch": torch.zeros(options.batch, dtype=torch.int64),
    }
    batch = {key: value.to(device) for key, value in batch.items()}
    print(f"{options.size}, batch {options.batch}, {device}, medians of {options.steps} steps\n")
    print("| step | precision | ours, s | plain, s | ratio |\n|---|---|---|---|---|")
    rows = []
    for precision in options.precisions:
        for case, algorithm in CASES.items():
            peer = "droppos" if case.startswith("droppos, affinity") else case
            settings = (options.size, batch, precision, device)
            ours_s, plain_s = measure(
                ours(algorithm(), *settings), plain(peer, *settings), options.steps
            )
            row = {
                "step": case,
                "precision": precision,
                "ours_s": statistics.median(ours_s),
                "plain_s": statistics.median(plain_s),
                "ratio": statistics.median(a / b for a, b in zip(ours_s, plain_s, strict=True)),
            }
            rows.append(row)
            print(
                f"| {case} | {precision} | {row['ours_s']:.3f} | {row['plain_s']:.3f} "
                f"| {row['ratio']:.2f} |",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
