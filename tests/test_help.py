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
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_all_commands_are_found() -> None:
    assert len(COMMANDS) >= 10 and {"pospre.train", "data_prep.convert"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m {command}" in done.stdout and "examples:" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("evaluate knn --model nowhere --data .", "--model nowhere does not exist"),
        ("evaluate knn --model . --data nowhere", "--data nowhere does not exist"),
        ("evaluate knn --model timm:x,no.pth --data .", "--model no.pth does not exist"),
        (
            "evaluate knn --model no.pth,positions=none --data .",
            "--model no.pth,positions=none does",
        ),
        ("evaluate knn --model README.md,positions=none --data nowhere", "--data nowhere does not"),
        ("evaluate knn --data .", "arguments are required: --model"),
        ("evaluate knn --model . --data . --k=5", "k=5)"),
        ("export nowhere out.pth --format timm", "URI nowhere does not exist"),
        ("sweep nowhere seed=1,2", "recipe nowhere does not exist"),
        ("certify nowhere", "recipe nowhere does not exist"),
        ("certify demo/mae --kills 0", "--kills is 0"),
        ("train demo/mae --data.path=photos", "data.path=photos)"),
        ("plan demo/mae --gpus 1 --gpu h100 --data.path x", "data.path=x)"),
        ("data_prep.convert nowhere out --format mds", "SRC nowhere does not exist"),
        ("data_prep.convert . out", "--format is missing"),
    ],
)
def test_a_mistake_is_said_before_anything_slow_is_imported(words: str, said: str) -> None:
    command, *arguments = words.split()
    done = run(command if "." in command else f"pospre.{command}", *arguments)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
