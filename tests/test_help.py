"""``--help`` of every command: it teaches, and answers without waiting for what training needs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for package in ("pospre", "data_prep")
    for path in (ROOT / package).rglob("*.py")
    if "sys.exit(run_command(main))" in path.read_text(encoding="utf-8")
)
SLOW = ("torch", "composer", "numba", "scipy", "matplotlib", "timm", "streaming", "ffcv")

# Runs modules as `python -m` does, one after another, and notes which slow packages each imports.
RUN = f"""
import contextlib, io, json, runpy, sys
answers = []
for sys.argv in json.load(sys.stdin):
    before, out, err = set(sys.modules), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    slow = sorted(set({SLOW}) & (set(sys.modules) - before))
    answers.append((code, out.getvalue(), err.getvalue(), slow))
json.dump(answers, sys.stdout)
"""
MISTAKES = [
    ("pospre.evaluate knn --model nowhere --data .", "--model nowhere does not exist"),
    ("pospre.evaluate knn --model . --data nowhere", "--data nowhere does not exist"),
    ("pospre.evaluate knn --model timm:x,no.pth --data .", "--model no.pth does not exist"),
    ("pospre.evaluate knn --model no.pth,positions=none --data .",
     "--model no.pth,positions=none does"),
    ("pospre.evaluate knn --model README.md,positions=none --data nowhere",
     "--data nowhere does not"),
    ("pospre.evaluate knn --data .", "arguments are required: --model"),
    ("pospre.evaluate knn --model . --data . --k=5", "k=5)"),
    ("pospre.embed out --model nowhere --data .", "--model nowhere does not exist"),
    ("pospre.embed out --model . --data . dtype=half", "embed: dtype=half"),
    ("pospre.export nowhere out.pth --format timm", "URI nowhere does not exist"),
    ("pospre.sweep nowhere seed=1,2", "recipe nowhere does not exist"),
    ("pospre.certify nowhere", "recipe nowhere does not exist"),
    ("pospre.certify demo/mae --kills 0", "--kills is 0"),
    ("pospre.train demo/mae --data.path=photos", "data.path=photos)"),
    ("pospre.plan demo/mae --gpus 1 --gpu h100 --data.path x", "data.path=x)"),
    ("data_prep.convert nowhere out --format mds", "SRC nowhere does not exist"),
    ("data_prep.convert . out", "--format is missing"),
]  # fmt: skip


class Answer(NamedTuple):
    """How a command ends: its exit code, what it says, and what it imports that is slow."""

    code: int
    out: str
    errors: str
    slow: list[str]


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """Return the answers to ``--help`` and to the mistakes, of one process that has no torch."""
    told = [f"{command} --help" for command in COMMANDS] + [words for words, _ in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([words.split() for words in told]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(told, (Answer(*found) for found in json.loads(done.stdout)), strict=True))


def test_all_commands_are_found() -> None:
    assert len(COMMANDS) >= 10 and {"pospre.train", "data_prep.convert"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command: str, answers: dict[str, Answer]) -> None:
    answer = answers[f"{command} --help"]
    assert answer.code == 0 and answer.slow == [], answer
    assert f"usage: python -m {command}" in answer.out and "examples:" in answer.out


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_said_before_anything_slow_is_imported(
    words: str, said: str, answers: dict[str, Answer]
) -> None:
    answer = answers[words]
    assert answer.code == 2 and said in answer.errors and answer.slow == [], answer
