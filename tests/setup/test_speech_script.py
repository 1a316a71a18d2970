"""What `make speech` runs, in a copy where python only notes how it was called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """\
#!/usr/bin/env bash
case "$*" in
*available_cores*) echo 2 ;;
*"$(cat "$0.refuses")"*) echo "error: no" >&2; exit 2 ;;
*) echo "$*" >>"$0.calls" ;;
esac
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A project of the scripts and a python that fails at nothing yet."""
    shutil.copytree(ROOT / ".setup", tmp_path / ".setup")
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(PYTHON)
    program.chmod(0o755)
    (program.parent / "python.refuses").write_text("nothing of this kind")
    return tmp_path


def run(copy: Path, *arguments: object, runs: str = "my runs") -> tuple[str, list[str]]:
    """Run the script; return what it said with its exit code, and the calls of python."""
    done = subprocess.run(
        [str(copy / ".setup" / "speech.sh"), *map(str, arguments)],
        env={**os.environ, "RUNS": runs, "SEEDS": "0 7"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    calls = copy / ".venv/bin/python.calls"
    noted = calls.read_text().splitlines() if calls.exists() else []
    return f"{done.stdout}{done.stderr}exit {done.returncode}", noted


def test_both_starts_get_the_same_budget(copy: Path) -> None:
    said, calls = run(copy, copy / "some words", "out dir")
    assert "exit 0" in said
    trained = [call for call in calls if call.startswith("-m pospre.train")]
    assert len(trained) == 5 and "demo_mp3.yaml" in " ".join(trained[:2])
    for seed in ("0", "7"):
        scratch = next(call for call in trained if f"some_words_scratch_s{seed}" in call)
        start = next(call for call in trained if f"some_words_from_mp3_s{seed}" in call)
        bare = start.replace(" encoder.weights=my runs/some_words_mp3", "")
        assert bare != start and bare.replace("from_mp3", "scratch") == scratch
    assert sum("pospre.evaluate accuracy" in call for call in calls) == 4
    assert all("data out dir/some_words/val" in c for c in calls if "pospre.evaluate" in c)


def test_a_run_that_fails_stops_all(copy: Path) -> None:
    (copy / ".venv/bin/python.refuses").write_text("pospre.train")
    said, calls = run(copy, copy / "words", "out")
    assert "error: no" in said and "exit 0" not in said
    assert not any("pospre.evaluate" in call for call in calls)


def test_what_is_no_archive_is_refused(copy: Path) -> None:
    (copy / "words.tar.gz").write_text("no archive")
    said, calls = run(copy, copy / "words.tar.gz", "out")
    assert "is no tar file that can be unpacked" in said and said.endswith("exit 2") and not calls
