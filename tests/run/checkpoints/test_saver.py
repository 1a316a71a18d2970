"""Saving: whole or not at all, once for each step, and never at the cost of what is there."""

import concurrent.futures
import errno
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import State
from composer.loggers import Logger

from pospre.errors import UserError
from pospre.run import run as door
from pospre.run.checkpoints import files as checkpoint_files
from pospre.run.checkpoints.folders import incomplete, remove
from pospre.run.checkpoints.rank_files import Part, Staging, Written
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.saver import CheckpointSaver
from tests.disk import full_disk, snapshot
from tests.processes import finished
from tests.run.checkpoints.checkpoint_files import holding, shard, write_checkpoint
from tests.training.tiny_runs import MAE, SHORT, Run, curve, environment, flat, metrics, no_space

CONTENT = holding({"a": torch.ones(200_000), "b": torch.ones(100_000)})


@pytest.mark.parametrize("size", [10_000, 1_190_000])
def test_a_full_disk_leaves_what_was_there(size: int, tmp_path: Path) -> None:
    write_checkpoint(CONTENT, tmp_path / "ep0-ba2")
    before = snapshot(tmp_path)
    with full_disk(size), pytest.raises(OSError, match="File too large"):
        write_checkpoint(CONTENT, tmp_path / "ep1-ba4")
    assert incomplete(tmp_path) == ["ep1-ba4"]
    assert not snapshot(tmp_path / "ep1-ba4")
    remove(tmp_path / "ep1-ba4")
    assert snapshot(tmp_path) == before


def test_a_disk_that_is_gone_is_said_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = OSError(errno.ESTALE, "Stale file handle")

    def stale(_: Path) -> None:
        raise gone

    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", stale)
    said = checkpoint_files.why_not_written(gone, tmp_path)
    assert said.startswith(f"Stale file handle ({tmp_path} does not answer). ")


def test_a_run_ends_with_one_message_on_a_full_disk(
    tiny: Path, run: Run, trained: Path, six_steps: Path
) -> None:
    options = (*SHORT, "trainer.keep_checkpoints=1")
    folder = trained / "checkpoints"
    for name in ("ep1-ba4", "ep1-ba6"):
        remove(folder / name)
    before = snapshot(folder)
    with full_disk(shard(folder / "ep0-ba2").stat().st_size // 2):
        code, said = run(tiny, *options)
    assert code == 2 and "Traceback" not in said
    assert f"checkpoint {folder}/ep1-ba4 cannot be written: File too large" in said
    assert "(ulimit -f), and run the command again" in said  # making room would not help
    assert f"it resumes from the last one, {folder}/ep0-ba2" in said
    assert snapshot(folder / "ep0-ba2") == {
        name.removeprefix("ep0-ba2/"): content for name, content in before.items()
    }
    assert run(tiny, *options)[0] == 0
    assert [path.name for path in folder.iterdir()] == ["ep1-ba6"]
    assert curve(folder.parent) == curve(six_steps)


def test_a_full_disk_under_the_metrics(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pospre.training.callbacks.metrics.MetricsFile.batch_end", no_space)
    code, said = run(tiny, *SHORT)
    assert (
        code == 2
        and "No space left on device" in said
        and f"free in {tmp_path}/runs/tiny). Make room" in said
    )


def test_a_save_that_is_killed_leaves_the_one_before(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from pospre.run.checkpoints.files import HashedFile
from tests.run.checkpoints.checkpoint_files import write_checkpoint
from tests.run.checkpoints.test_saver import CONTENT
folder = Path({str(tmp_path)!r})
write_checkpoint(CONTENT, folder / "ep0-ba2")
write = HashedFile.write
def killed(self, data):
    if self.size > 600_000:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, data)
HashedFile.write = killed
write_checkpoint(CONTENT, folder / "ep1-ba4")
"""
    done = finished([sys.executable, "-c", script], env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert incomplete(tmp_path) == ["ep1-ba4"]
    newest = open_newest([str(tmp_path)])
    assert newest is not None and newest.uri == f"{tmp_path}/ep0-ba2"


def test_the_manifest_of_an_older_one_never_belies_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ep0-ba2"
    write_checkpoint({**CONTENT, "more": 1}, path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint({**CONTENT, "more": 2}, path)
    assert open_newest([str(tmp_path)]) is None
    write_checkpoint({**CONTENT, "more": 2}, path)
    newest = open_newest([str(tmp_path)])
    assert newest is not None and newest.content["more"] == 2
    assert len([*path.iterdir()]) == 3  # nothing of the killed one is left


class Eager(CheckpointSaver):
    """Saves also after every step, as one that is told to stop does; counts what is written."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.written: list[str] = []
        self.after_save.append(lambda path: self.written.append(path.name))
        self.forbidden = -1
        MADE.append(self)

    def before_save(self, state: State) -> None:
        if state.timestamp.batch == self.forbidden:
            raise UserError("this state is not worth it")

    def batch_end(self, state: State, logger: Logger) -> None:
        self.save(state)


MADE: list[Eager] = []


def test_a_step_is_saved_once(tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "CheckpointSaver", Eager)
    assert run(tiny, *SHORT)[0] == 0
    steps = [f"ep{(step - 1) // 3}-ba{step}" for step in range(1, 7)]
    assert MADE.pop().written == steps


def test_a_save_can_be_vetoed(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Vetoed(Eager):
        def fit_start(self, state: State, logger: Logger) -> None:
            super().fit_start(state, logger)
            self.forbidden = 3

    monkeypatch.setattr(door, "CheckpointSaver", Vetoed)
    code, said = run(tiny, *SHORT)
    assert code == 2 and "this state is not worth it" in said
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"ep0-ba1", "ep0-ba2"}
    assert not incomplete(folder)


def test_training_goes_on_while_a_checkpoint_is_written(
    tiny: Path, run: Run, six_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, write = threading.Event(), Part.write

    def slow(part: Part, path: Path) -> Written:
        assert path.name != "ep0-ba2" or trained.wait(30)
        return write(part, path)

    class Watching(CheckpointSaver):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 3:
                trained.set()

    monkeypatch.setattr(Part, "write", slow)
    monkeypatch.setattr(door, "CheckpointSaver", Watching)
    assert run(tiny, *SHORT)[0] == 0
    for name in ("ep0-ba2", "ep1-ba4", "ep1-ba6"):  # the step's state, not a later one
        ours, theirs = (
            read_checkpoint(str(folder / "checkpoints" / name)).content
            for folder in (tmp_path / "runs" / "tiny", six_steps)
        )
        assert flat(ours["state"]["model"]) == flat(theirs["state"]["model"])
        assert flat(ours["state"]["optimizers"]) == flat(theirs["state"]["optimizers"])
        assert flat(ours["rng"][0]["torch"]) == flat(theirs["rng"][0]["torch"])


def test_a_save_that_fails_is_raised_after_the_next_step(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patient(CheckpointSaver):
        def batch_end(self, state: State, logger: Logger) -> None:
            concurrent.futures.wait([self._writing] if self._writing else [])

    monkeypatch.setattr(Part, "write", no_space)
    monkeypatch.setattr(door, "CheckpointSaver", Patient)
    code, said = run(tiny, *SHORT)
    folder = tmp_path / "runs" / "tiny"
    assert code == 2 and "Traceback" not in said
    assert f"{folder}/checkpoints/ep0-ba2 cannot be written: No space left on device" in said
    assert "it resumes from the start" in said and said.count("cannot be written") == 1
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]


def test_what_diverges_names_the_checkpoint_that_is_being_written(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Part.write

    def slow(part: Part, path: Path) -> Written:
        time.sleep(1)
        return write(part, path)

    monkeypatch.setattr(Part, "write", slow)
    code, said = run(tiny, MAE, "optimizer.base_lr=1.0e30", "trainer.save_interval=2ba")
    assert code == 2 and "training diverged: after step 3" in said
    assert f"({tmp_path}/runs/tiny/checkpoints/ep0-ba2, of the step before, gave this" in said


def test_staged_tensors_are_copies_in_the_same_memory() -> None:
    staging, weights = Staging(), torch.arange(6.0).reshape(2, 3)
    state = {"a": weights, "b": weights.T}
    first = staging.copy(state)
    memory = first["a"].data_ptr()
    weights += 1
    assert first["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and first["b"].is_contiguous()
    second = staging.copy({**state, "new": torch.ones(1)})
    assert flat(second) == flat({**state, "new": torch.ones(1)})
    assert second["a"].data_ptr() == memory != weights.data_ptr()
    assert staging.copy({"a": torch.ones(7)})["a"].tolist() == [1] * 7
