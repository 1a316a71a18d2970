"""Locks of the shard cache: many of them, and one that another process never lets go."""

import errno
import fcntl
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pospre.data.bucket import cache as shard_cache
from pospre.data.bucket import fetcher
from pospre.data.bucket.cache import ShardCache, allow_many_files
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


def test_many_shards_stay_open(few_files: int, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, ADDRESS, FILES, 10**12)
    cache.file(SHARD).write_bytes(b"shard")
    allow_many_files()
    files = [cache.open(SHARD) for _ in range(1500)]
    assert None not in files


def test_too_many_files_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    cache = ShardCache(tmp_path, ADDRESS, FILES, 10**12)
    monkeypatch.setattr(shard_cache, "FileIO", full)
    with pytest.raises(UserError, match=r"Too many open files.* raise ulimit -n"):
        cache.open(SHARD)


def test_what_is_open_is_not_evicted(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, ADDRESS, FILES, 100)
    for name in ("old", "new"):
        cache.file(name).write_bytes(bytes(50))
    old = cache.open("old")
    for _ in range(2):  # what is no more is no obstacle
        with cache.incoming("next", 50, dict, urgent=False) as path:
            assert path is not None
    assert old is not None and cache.file("old").exists() and not cache.file("new").exists()
    with cache.incoming("next", 60, dict, urgent=False) as path:
        assert path is None
    old.close()
    with cache.incoming("next", 60, dict, urgent=False) as path:
        assert path is not None
    assert cache.open("old") is None


def test_a_shard_that_gets_its_name_while_room_is_made_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ShardCache(tmp_path, ADDRESS, FILES, 100)
    naming = threading.Thread(target=cache.publish, args=("first",))

    scan = os.scandir

    def listed(folder: Path) -> list[os.DirEntry[str]]:
        found = list(scan(folder))
        naming.start()
        naming.join(0.5)  # without a lock it has its name now
        return found

    with cache.incoming("first", 60, dict, urgent=False) as path:
        assert path is not None
        monkeypatch.setattr(shard_cache.os, "scandir", listed)
        with cache.incoming("second", 60, dict, urgent=False) as path:
            assert path is None  # 120 bytes in a cache of 100 before
        naming.join()
    assert cache.file("first").stat().st_size == 60


def test_a_limit_that_is_never_reached_keeps_nothing_open(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[str] = []
    monkeypatch.setattr(fetcher, "allow_many_files", lambda: locked.append("kept"))
    reader = open_remote(cache_limit=10**9)
    reader.expect(np.arange(len(reader)))
    check(reader)
    assert not locked
    reader = open_remote(cache_limit=100_000)
    reader.expect(np.arange(len(reader)))
    check(reader)
    assert locked


def test_a_process_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, free = (ShardCache(tmp_path, ADDRESS, FILES, limit) for limit in (10**6, None))
    monkeypatch.setattr(shard_cache, "_STUCK", 0.3)
    said = r"another process has held .* hangs; end it"
    with open(cache.path.parent / "lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a run stopped by Ctrl-Z holds it
        for is_new in (True, False):
            start = time.monotonic()
            with pytest.raises(UserError, match=said):
                if is_new:
                    ShardCache(tmp_path, ADDRESS, FILES, None)
                else:
                    with cache.incoming(SHARD, 10, dict, urgent=True):
                        pass
            assert 0.2 < time.monotonic() - start < 20
        with free.incoming("free", 10, dict, urgent=True):  # without a limit nothing is counted
            free.publish("free")
    assert free.file("free").stat().st_size == 10
    again = ShardCache(tmp_path, ADDRESS, FILES, None)
    assert not again.holds(FileEntry(basename=SHARD, bytes=10))


def test_one_downloads_a_shard_at_a_time(tmp_path: Path) -> None:
    caches = [ShardCache(tmp_path, ADDRESS, FILES, None) for _ in range(2)]
    stop = threading.Event()
    with caches[0].downloading(SHARD, 1, stop) as first:
        found: list[bool] = []

        def try_it(patience: float) -> None:
            with caches[1].downloading(SHARD, patience, stop) as second:
                found.append(second)

        try_it(0)
        waiting = threading.Thread(target=try_it, args=(60,))
        waiting.start()
        stop.set()
        waiting.join(10)
        assert first and found == [False, False]
