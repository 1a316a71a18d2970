"""A tiny recipe over a small image folder, and the command in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pospre.errors import run_command
from pospre.train import main


@pytest.fixture
def tiny(tmp_path: Path, image_folder: Callable[..., Path]) -> Path:
    """Return a recipe of 4 epochs of 3 steps; its run folder is ``tmp_path/runs/tiny``."""
    recipe: dict[str, Any] = {
        "data": {"path": str(image_folder(num_images=24)), "batch_size": 8, "num_workers": 1},
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
            "run_folder": str(tmp_path / "runs"),
            "log_interval": 1,
            "progress_bar": False,
            "keep_checkpoints": -1,
        },
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return ``run(recipe, *overrides) -> (exit code, output)``: the command in this process."""

    def train(recipe: Path, *overrides: str) -> tuple[int, str]:
        capfd.readouterr()
        code = run_command(lambda: main([str(recipe), *overrides]))
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return train
