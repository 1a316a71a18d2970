"""What a start may delete, what it refuses, and what a failed one leaves."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pospre.recipe.recipe import load_recipe
from pospre.run.folder import LOCK, hold_run
from tests.disk import snapshot
from tests.training.tiny_runs import Run

SHORT = ("trainer.max_duration=2ba", "schedule.warmup=1ba")


def test_overwrite_spares_the_checkpoints_of_another_run(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    shared = f"trainer.save_folder={tmp_path}/shared"
    assert run(tiny, *SHORT, shared)[0] == 0
    assert run(tiny, *SHORT, "run_name=other")[0] == 0
    before = snapshot(tmp_path)
    code, said = run(tiny, *SHORT, shared, "run_name=other", "trainer.overwrite=true")
    assert code == 2 and "belongs to run 'tiny'" in said and "trainer.save_folder" in said
    code, said = run(tiny, *SHORT, shared, "run_name=third")
    assert code == 2 and "belongs to run 'tiny', not to 'third'" in said
    assert "choose another trainer.save_folder" in said  # another name would not help
    assert snapshot(tmp_path) == before
    assert run(tiny, *SHORT, shared, "trainer.overwrite=true", "seed=1")[0] == 0


@pytest.mark.parametrize("options", [(), ("trainer.overwrite=true",)])
def test_a_file_in_the_place_of_the_run_folder(
    options: tuple[str, ...], tiny: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").write_text("a file")
    code, said = run(tiny, *SHORT, *options)
    assert code == 2 and "runs/tiny is a file" in said and "run_name" in said
    assert (tmp_path / "runs" / "tiny").read_text() == "a file"


def test_nothing_is_cleared_where_nothing_can_be_written(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tiny, *SHORT)[0] == 0
    before = snapshot(tmp_path)
    locked = tmp_path / "locked"
    locked.mkdir()
    real = os.access

    def access(path: Any, mode: int, **options: Any) -> bool:
        return Path(path) != locked and real(path, mode, **options)

    monkeypatch.setattr(os, "access", access)
    for options in ((), ("trainer.overwrite=true",)):
        code, said = run(tiny, *SHORT, f"trainer.save_folder={locked}", *options)
        assert code == 2 and f"trainer.save_folder {locked} cannot be written" in said
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_start_leaves_nothing(
    number: int, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("pospre.run.folder.os.replace", fails)
        code, said = run(tiny, *SHORT)
    folder = tmp_path / "runs" / "tiny"
    assert code == 2 and f"run folder {folder} cannot be written: {os.strerror(number)}" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("options", [(), ("trainer.overwrite=true",)])
def test_what_a_killed_start_left_is_no_obstacle(
    options: tuple[str, ...], tiny: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml.partial").write_text("run_na")
    assert run(tiny, *SHORT, *options)[0] == 0
    assert (folder / "recipe.yaml").exists() and not (folder / "recipe.yaml.partial").exists()


def test_a_folder_of_another_recipe_is_refused(tiny: Path, run: Run, tmp_path: Path) -> None:
    assert run(tiny, *SHORT)[0] == 0
    code, said = run(tiny, *SHORT, "schedule.unit=epoch")
    assert code == 2 and "schedule.unit = step, this one epoch" in said
    changed = {**yaml.safe_load(tiny.read_text()), "algorithms": {"simmim": {}}}
    tiny.write_text(yaml.safe_dump(changed))
    code, said = run(tiny, *SHORT)
    assert code == 2 and "algorithms = droppos, this one simmim" in said


def test_a_second_run_in_the_same_folder_is_refused(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder, shared = tmp_path / "runs" / "tiny", tmp_path / "shared"
    assert run(tiny, *SHORT)[0] == 0 and not (folder / LOCK).exists()
    before = snapshot(tmp_path)
    with hold_run(load_recipe(tiny, SHORT)):
        for options in ((), ("trainer.overwrite=true",)):
            code, said = run(tiny, *SHORT, *options)
            assert code == 2 and f"{folder} is in use by another run" in said
            assert f"process {os.getpid()} on {socket.gethostname()}" in said
    assert snapshot(tmp_path) == before
    with hold_run(load_recipe(tiny, ["run_name=other", f"trainer.save_folder={shared}"])):
        code, said = run(tiny, *SHORT, f"trainer.save_folder={shared}")
        assert code == 2 and f"{shared} is in use" in said
    assert snapshot(tmp_path) == before and not shared.exists()
    assert run(tiny, *SHORT, "trainer.overwrite=true")[0] == 0


def test_a_killed_run_does_not_lock_its_folder(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    script = (
        "import fcntl, os, signal, sys; file = open(sys.argv[1], 'w'); "
        "fcntl.flock(file, fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(folder / LOCK)], check=False)
    assert killed.returncode == -signal.SIGKILL and (folder / LOCK).exists()
    assert run(tiny, *SHORT)[0] == 0
    assert not (folder / LOCK).exists()


def test_a_job_that_is_requeued_does_not_overwrite_itself(
    tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ("trainer.overwrite=true", "trainer.save_interval=2ba", "schedule.length=6ba")
    assert run(tiny, *again, "trainer.max_duration=4ba")[0] == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, said = run(tiny, *again, "trainer.max_duration=6ba")
    assert code == 0 and f"resuming from {tmp_path}/runs/tiny/checkpoints/ep1-ba4" in said, said
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    code, said = run(tiny, *again, "trainer.max_duration=6ba")
    assert code == 0 and "resuming from" not in said and "finished" not in said, said
