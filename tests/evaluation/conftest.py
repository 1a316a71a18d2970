"""Checkpoints for the tests of evaluation and export."""

from pathlib import Path

import pytest

from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe


@pytest.fixture(scope="session")
def droppos_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a DropPos checkpoint; tests must not write into its run folder."""
    return save_checkpoint(tiny_recipe(tmp_path_factory.mktemp("runs"), "droppos"))


@pytest.fixture(scope="session")
def mae_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an MAE checkpoint; tests must not write into its run folder."""
    return save_checkpoint(tiny_recipe(tmp_path_factory.mktemp("runs"), "mae"))
