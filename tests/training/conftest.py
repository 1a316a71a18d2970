"""A tiny recipe over a small image folder, and the command in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pospre.errors import run_command
from pospre.train import main
from tests.training.tiny_runs import write_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a recipe of 4 epochs of 3 steps; its run folder is ``tmp_path/runs/tiny``."""
    return write_tiny(tmp_path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return ``run(recipe, *overrides) -> (exit code, output)``: the command in this process."""

    def train(recipe: Path, *overrides: str) -> tuple[int, str]:
        capfd.readouterr()
        code = run_command(lambda: main([str(recipe), *overrides]))
        captured = capfd.readouterr()
        return code, captured.out + captured.err

    return train
