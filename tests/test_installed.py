"""A command by a Python that lacks what it needs is one message, not a traceback."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pospre.installed import NEEDED

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "pospre").glob("*.py"))
COMMANDS = [
    *(f"pospre.{path.stem}" for path in FILES if '"__main__"' in path.read_text("utf-8")),
    *(f"data_prep.{name}" for name in ("convert", "verify", "statistics", "scenes")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_python_without_packages_is_told_the_right_one(command: str) -> None:
    bare = [sys.executable, "-S", "-E", "-m", command, "a b"]
    done = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {sys.executable} lacks")
    assert "torch, torchvision, timm and 15 more; use the one that `make setup` in" in done.stderr
    assert done.stderr.endswith(f".venv/bin/python -m {command} 'a b'\n")


def test_what_is_looked_for_is_what_the_package_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    brought = importlib.metadata.packages_distributions()
    assert {canonicalize_name(brought[name][0]) for name in NEEDED} == wanted
