"""A save while the disk turns read-only, while the run is told to stop, and before the next one."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from composer.core import State
from composer.loggers import Logger

from pospre.run import run as door
from pospre.run.checkpoints.folders import remove
from pospre.run.checkpoints.rank_files import Part, Written
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.run.checkpoints.saver import CheckpointSaver
from tests.disk import snapshot
from tests.training.tiny_runs import SHORT, Run, metrics


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Callable[[], int]]:
    """Give a function that makes a folder read-only, for root as well, as a disk that failed is."""
    bound = ["mount", "--bind", str(folder), str(folder)]
    if shutil.which("mount") is None or subprocess.run(bound, capture_output=True).returncode:
        pytest.skip("this process may not mount anything")
    remount = ["mount", "-o", "remount,ro,bind", str(folder)]
    try:
        yield lambda: subprocess.check_call(remount)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_folder_that_becomes_read_only(
    tiny: Path, run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained / "checkpoints"
    for path in [*folder.glob("ep1-*")]:
        remove(path)
    before = snapshot(folder)
    with read_only(folder) as spoil:

        class Spoilt(CheckpointSaver):
            def batch_end(self, state: State, logger: Logger) -> None:
                if state.timestamp.batch == 3:
                    spoil()

        monkeypatch.setattr(door, "CheckpointSaver", Spoilt)
        code, said = run(tiny, *SHORT)
        assert code == 2 and "Traceback" not in said and said.count("cannot be written") == 1
        assert "Read-only file system" in said and "resumes from the last" in said
        assert f"checkpoint {folder}/ep1-ba4" in said
        monkeypatch.undo()
        code, said = run(tiny, *SHORT)  # it is from the start
        assert code == 2 and f"save_folder {folder} cannot be written" in said
        assert "resuming from" not in said and snapshot(folder) == before
    with read_only(folder.parent) as spoil:
        spoil()
        code, said = run(tiny, *SHORT)
        assert code == 2 and f"{folder.parent} cannot be written" in said
    assert run(tiny, *SHORT)[0] == 0 and set(before) < set(snapshot(folder))


def test_sigterm_while_a_checkpoint_is_written(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Part.write

    def slow(part: Part, path: Path) -> Written:
        if path.name == "ep0-ba2":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        return write(part, path)

    monkeypatch.setattr(Part, "write", slow)
    code, said = run(tiny, *SHORT)
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert code == 75 and f"saved in {folder}/ep0-ba3; the same command resumes" in said
    for step in (2, 3):
        saved = read_checkpoint(f"{folder}/ep0-ba{step}").content
        assert saved["state"]["timestamp"]["Timestamp"]["batch"] == step


def test_the_wait_for_the_save_before_counts_as_saving(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Part.write

    def slow(part: Part, path: Path) -> Written:
        time.sleep(2 if path.name == "ep0-ba1" else 0)
        return write(part, path)

    monkeypatch.setattr(Part, "write", slow)
    options = ("trainer.max_duration=3ba", "trainer.save_interval=1ba")
    assert run(tiny, *options)[0] == 0
    # the second save waited for the first, before the third step
    last = metrics(tmp_path / "runs" / "tiny")[-1]
    assert last["time/save"] > 0.5 and last["time/evaluation"] < 0.5
