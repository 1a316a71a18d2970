"""What a checkpoint was written with: noted twice, and said where it differs."""

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import pospre
from pospre.run.checkpoints import files as checkpoint_files
from pospre.run.checkpoints.files import revision
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.build import load_model
from tests.training.tiny_runs import Run


def git(folder: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *command], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_revision_is_that_of_the_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    package, installed = tmp_path / "pospre", tmp_path / ".venv" / "pospre"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("a = 1\n")
    git(tmp_path, "add", "pospre")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert revision(package) == commit
    revision.cache_clear()
    (package / "__init__.py").write_text("a = 2\n")
    assert revision(package) == f"{commit}-dirty"
    assert revision(installed) is None  # in a checkout that it is not a part of
    assert revision(tmp_path / "nowhere") is None


def test_other_versions_are_said(
    tiny: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ("trainer.max_duration=4ba", "trainer.save_interval=2ba")
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert run(tiny, *options)[0] == 0
    noted = json.loads((folder / "ep0-ba2" / "manifest.json").read_text())["versions"]
    assert noted == read_checkpoint(str(folder / "ep0-ba2")).content["versions"]
    assert noted["pospre"] == pospre.__version__ and noted["world_size"] == 1
    assert (noted["torch"], noted["python"]) == (torch.__version__, platform.python_version())

    shutil.rmtree(folder / "ep1-ba4")
    other = {**noted, "revision": "abc", "torch": "9.9", "world_size": 2}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "versions", lambda: other)
        code, said = run(tiny, *options)
        assert code == 0 and f"resuming from {folder}/ep0-ba2" in said
        assert f"warning: {folder}/ep0-ba2 was written with revision " in said
        assert f"torch '{torch.__version__}' (here '9.9')" in said and "world_size" not in said
        load_model(str(folder.parent))
        assert "ep1-ba4 was written with" in capfd.readouterr().err
    load_model(str(folder.parent))
    assert capfd.readouterr().err == ""
