"""``--help`` of every command: it teaches, and answers without waiting for what training needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for package in ("pospre", "data_prep")
    for path in (ROOT / package).rglob("*.py")
    if "sys.exit(run_command(main))" in path.read_text(encoding="utf-8")
)
SLOW = ("torch", "composer", "numba", "scipy", "matplotlib", "timm", "streaming", "ffcv")

# Runs a module as `python -m` does, and then says which slow packages it has imported.
RUN = f"""
import atexit, runpy, sys
atexit.register(lambda: print("imported:", *sorted(set({SLOW}) & set(sys.modules))))
sys.argv = [sys.argv[1], "--help"]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_all_commands_are_found() -> None:
    assert len(COMMANDS) >= 10 and {"pospre.train", "data_prep.convert"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m {command}" in done.stdout and "examples:" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"
