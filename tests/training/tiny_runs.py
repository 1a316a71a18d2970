"""Training in a process of its own, and reading what came out."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pospre.training.callbacks.metrics import StepLosses
from tests.conftest import write_images
from tests.processes import LIMIT, launcher, until

ROOT = Path(__file__).parents[2]
MAE = "algorithms={mae: {decoder_dim: 32, decoder_depth: 1, decoder_heads: 2}}"
LONG = (
    MAE,
    "trainer.max_duration=200ep",
    "schedule={warmup: 2ba, length: 200ep}",  # nothing here depends on the run's own length
)
SHORT = ("trainer.max_duration=6ba", "trainer.save_interval=2ba")
"""With checkpoints ep0-ba2, ep1-ba4 and ep1-ba6."""

Run = Callable[..., tuple[int, str]]
"""The command in this process: ``run(recipe, *overrides) -> (exit code, output)``."""


def write_tiny(folder: Path) -> Path:
    """Write a recipe of 4 epochs of 3 steps, whose run folder is ``folder/runs/tiny``."""
    images = write_images(folder / "images", 24, ("cat", "dog"))
    recipe: dict[str, Any] = {
        "data": {"path": str(images), "batch_size": 8, "num_workers": 1},
        "encoder": {"name": "vit_tiny16", "image_size": 64, "depth": 1},
        "algorithms": {
            "droppos": {
                "mask_ratio": 0.5,
                "decoder_dim": 32,
                "decoder_depth": 1,
                "decoder_heads": 2,
            }
        },
        "schedule": {"warmup": "2ba"},
        "optimizer": {"base_lr": 0.03},
        "trainer": {
            "max_duration": "4ep",
            "precision": "fp32",
            "device": "cpu",
            "run_folder": str(folder / "runs"),
            "log_interval": 1,
            "progress_bar": False,
            "keep_checkpoints": -1,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def command(recipe: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """Return the command line that trains ``recipe`` on its own."""
    start = [sys.executable] if ranks == 1 else launcher(ranks)
    return [*start, "-m", "pospre.train", str(recipe), *overrides]


def environment() -> dict[str, str]:
    """Return the environment for ``command``: one thread, as in this process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def look_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses be there only while the next step runs, as on a GPU."""
    monkeypatch.setattr(StepLosses, "is_late", property(lambda losses: losses._losses is None))


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Return (step, total loss, learning rate) of every line of a run's metrics."""
    # not what was measured in between
    steps = (line for line in metrics(folder) if "loss/total" in line)
    return [(line["step"], line["loss/total"], line["lr"]) for line in steps]


def flat(value: Any) -> Any:
    """Return nested tensors as something that ``==`` compares."""
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.contiguous().numpy().tobytes()
    return value


def no_space(*_: Any) -> None:
    """Stand for a write to a disk that is full."""
    raise OSError(28, "No space left on device")


def wait_for_step(step: int, folder: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until a run in a process of its own has logged a step."""
    path = folder / "metrics.jsonl"
    _wait(lambda: path.exists() and path.read_text().count("\n") >= step, process)


def wait_for_save(folder: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until a run in a process of its own has a checkpoint, which it writes beside steps."""
    _wait(lambda: any((folder / "checkpoints").glob("*/manifest.json")), process)


def _wait(is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    def still_runs() -> bool:
        assert process.poll() is None
        return is_so()

    until(still_runs, LIMIT)
