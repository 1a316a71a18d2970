"""The tiny recipe of the tests of training, its command in this process, and a finished run."""

import shutil
from pathlib import Path

import pytest

from pospre.train import main
from tests.training.conftest import run as run
from tests.training.conftest import tiny as tiny
from tests.training.tiny_runs import SHORT, write_tiny


@pytest.fixture(scope="session")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of a tiny recipe, of which ``trained`` gives a copy."""
    folder = tmp_path_factory.mktemp("six_steps")
    assert main([str(write_tiny(folder)), *SHORT]) == 0
    return folder / "runs" / "tiny"


@pytest.fixture
def trained(tiny: Path, six_steps: Path, tmp_path: Path) -> Path:
    """Return the folder of the tiny recipe's run as ``SHORT`` leaves it."""
    return shutil.copytree(six_steps, tmp_path / "runs" / "tiny")
