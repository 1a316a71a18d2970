"""Locks of the shard cache: many of them, and those that another process never lets go."""

import errno
import fcntl
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pospre.data.bucket import cache as shard_cache
from pospre.data.bucket.cache import ShardCache
from pospre.data.stores.mds_index import FileEntry
from pospre.errors import UserError
from tests.data.buckets import check, open_remote

ADDRESS = "s3://bucket/set"
FILES = {"index.json": b"{}"}
SHARD = "shard.00000.mds"


@pytest.fixture
def few_files() -> Iterator[int]:
    """A process that may open 256 files, unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip(f"the system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_shards_are_kept(few_files: int, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, ADDRESS, FILES, 10**12)
    for number in range(1500):
        cache.keep(f"shard.{number:05d}.mds")
    cache.let_all_go()


def test_too_many_files_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    cache = ShardCache(tmp_path, ADDRESS, FILES, 10**12)
    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(UserError, match=r"Too many open files.* raise ulimit -n"):
        cache.keep(SHARD)


def test_a_limit_that_is_never_reached_keeps_nothing(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[str] = []
    monkeypatch.setattr(shard_cache, "_allow_many_files", lambda: locked.append("kept"))
    reader = open_remote(cache_limit=10**9)
    reader.expect(np.arange(len(reader)))
    check(reader)
    assert not locked
    reader = open_remote(cache_limit=100_000)
    reader.expect(np.arange(len(reader)))
    check(reader)
    assert locked


@pytest.mark.parametrize("what", ["version", "room", "use"])
def test_a_process_that_hangs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    cache = ShardCache(tmp_path, ADDRESS, FILES, 10**6)
    path = {
        "version": cache.path.with_name(f"{cache.path.name}.lock"),
        "room": cache.path / "locks" / ".room",
        "use": cache.path / "locks" / f"{SHARD}.use",
    }[what]
    if what == "version":
        del cache  # it shares this lock
    monkeypatch.setattr(shard_cache, "_STUCK", 0.3)
    start = time.monotonic()
    with (
        open(path, "a") as other,
        pytest.raises(UserError, match=r"another process has held .* hangs; end it"),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a run stopped by Ctrl-Z holds it
        if what == "use":
            cache.keep(SHARD)
        elif what == "room":
            with cache.incoming(SHARD, 10, dict, urgent=True):
                pass
        else:
            ShardCache(tmp_path, ADDRESS, FILES, None)
    assert 0.2 < time.monotonic() - start < 3
    again = ShardCache(tmp_path, ADDRESS, FILES, None)
    assert not again.holds(FileEntry(SHARD, 10, {}))
