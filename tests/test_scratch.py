"""Temporary folders: whose they are, what kills leave, and what a full disk says."""

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pospre.data.bucket.cache import cache_root
from pospre.errors import UserError
from pospre.scratch import boot_id, cause_of_full_disk, remove_folder_of_torch, scratch, user_cache
from tests.refusals import refuses

_WAITING = """
import tempfile, time
tempfile.tempdir = {!r}
from pospre.scratch import scratch
with scratch() as folder:
    (folder / "file").write_text("x")
    print(flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_what_a_killed_process_left_is_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", _WAITING.format(str(place))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        now = time.time
        # as seen an hour later by another container, which does not know the process's number
        monkeypatch.setattr("pospre.scratch.time.time", lambda: now() + 3600)
        with scratch():
            assert len([*place.iterdir()]) == 4
        process.kill()
    with scratch() as folder:
        assert {*place.iterdir()} == {folder, folder.with_name(f"{folder.name}.lock")}
    assert not [*place.iterdir()]


@pytest.mark.parametrize(("age", "boot", "stays"), [(0, "", 1), (60, "another", 1), (8e5, "", 0)])
def test_a_lock_of_another_machine_stays_for_a_week(
    place: Path, monkeypatch: pytest.MonkeyPatch, age: float, boot: str, stays: bool
) -> None:
    (place / "pospre-tmp-a").mkdir()
    (place / "pospre-tmp-a.lock").write_text(boot or boot_id())
    now = time.time()
    monkeypatch.setattr("pospre.scratch.time.time", lambda: now + age)
    with scratch():
        assert (place / "pospre-tmp-a").exists() == stays


def test_the_folder_that_torch_makes_is_removed() -> None:
    from torch.distributed.nn.jit import instantiator  # makes it

    for _ in range(2):
        remove_folder_of_torch()
        made = getattr(instantiator, "INSTANTIATED_TEMPLATE_DIR_PATH", None)  # torch 2.14: none
        assert made is None or not Path(made).exists()


def test_a_full_disk_is_named(place: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=rf"{place}, .* \(No space .*set TMPDIR"), scratch():
        raise full
    assert not [*place.iterdir()]
    with pytest.raises(FileNotFoundError), scratch():  # another fault
        Path("/nowhere/file").read_text()
    error = UserError("outer")
    error.__cause__ = UserError("inner")
    assert cause_of_full_disk(error) is None
    error.__cause__.__cause__ = full
    assert cause_of_full_disk(error) is full


def test_a_user_without_a_home_has_a_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert user_cache() == Path("/caches/pospre")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache() == cache_root(None) == Path("/home/me/.cache/pospre")

    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("POSPRE_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    folder = place / f"pospre-{os.getuid()}"
    assert user_cache() == cache_root(None) == folder and folder.stat().st_mode & 0o777 == 0o700
    refuses(r"data\.cache_dir ~/x.*set HOME", lambda: cache_root("~/x"))
    folder.rmdir()
    folder.symlink_to(place)
    refuses("belongs to another user", user_cache)
