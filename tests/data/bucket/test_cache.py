"""The cache of downloaded shards: filled ahead, shared, limited, replaced, left by killed runs."""

import base64
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pospre.data.loader import build_loader
from pospre.data.order import epoch_order
from pospre.data.stores.reader import Visits
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from tests.data.buckets import ADDRESS, NUM_SAMPLES, OPEN, check, open_remote, shard_gets
from tests.data.flaky_s3 import Fault, FlakyS3
from tests.processes import LIMIT, started, until
from tests.refusals import refuses


def fetchers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "pospre-fetch" in thread.name}


def test_what_is_expected_comes_ahead(bucket: Any, server: FlakyS3) -> None:
    others = fetchers()  # an earlier test's may still read from a server that is slow
    reader = open_remote()
    reader.expect(np.array([33, 34, 1]))
    until(lambda: len(list(reader.path.glob("*.mds"))) == 2)
    assert set(server.gets) - {"index.json", "pospre.json", "set", "bucket"} == {
        "shard.00000.mds",
        "shard.00004.mds",
    }
    reader.close()
    refuses(r"reading was ended", lambda: reader.read(9))
    reader.expect(np.arange(NUM_SAMPLES))
    check(reader)
    reader.close()
    assert fetchers() <= others


def test_closing_ends_those_who_wait(bucket: Any, server: FlakyS3) -> None:
    reader = open_remote()
    server.spoil_always("shard.00001.mds", Fault(pause=30))  # 15 s of it make a silence
    said: list[str] = []

    def read() -> None:
        with pytest.raises(UserError) as caught:
            reader.read(9)
        said.append(str(caught.value))

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: server.gets["shard.00001.mds"] == 1)
    start = time.monotonic()
    reader.close()
    thread.join()
    assert time.monotonic() - start < 12 and "reading was ended" in said[0]


def test_threads_share_a_download(bucket: Any, server: FlakyS3) -> None:
    readers = [open_remote(), open_remote()]
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    errors: list[BaseException] = []

    def read(number: int) -> None:
        try:
            check(readers[number % 2], order[number::4])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and shard_gets(server) == [1] * 5


def test_cut_and_vanished_shards_are_fetched_again(bucket: Any, server: FlakyS3) -> None:
    reader = open_remote()
    check(reader)
    first, second = (reader.path / f"shard.0000{number}.mds" for number in range(2))
    first.unlink()
    second.write_bytes(second.read_bytes()[:1000])
    check(reader)
    assert shard_gets(server) == [2, 2, 1, 1, 1]
    second.write_bytes(second.read_bytes()[:1000])
    check(open_remote())
    assert shard_gets(server) == [2, 3, 1, 1, 1]


def flip_a_bit(path: Path, where: str = "image", index: int = 2) -> None:
    """Damage the bytes of a sample, or what says where they lie, as a bad disk would."""
    content = bytearray(path.read_bytes())
    begin, end = np.frombuffer(content, "<u4", 2, 4 * (index + 1)).tolist()
    (image_size,) = np.frombuffer(content, "<u4", 1, begin).tolist()
    places = {"image": (begin + end) // 2, "sizes": begin, "offset": 4 * (index + 1)}
    places["label"] = begin + 8 + image_size  # behind the sizes of image and path
    content[places[where]] ^= 4
    path.write_bytes(content)


def loader_of(address: str | Path, **options: Any) -> Any:
    return build_loader(
        address, views=[ViewGroup("view", 1, (16, 16))], batch_size=4, seed=1, **options
    )


@pytest.mark.parametrize(
    ("num_workers", "where"), [(0, "image"), (2, "sizes"), (0, "offset"), (2, "label")]
)
def test_a_shard_damaged_in_the_cache_is_fetched_again(
    upload: Any, server: FlakyS3, stored: Any, num_workers: int, where: str
) -> None:
    upload(stored("mds"))
    want = list(loader_of(stored("mds")))
    loader = loader_of(ADDRESS, num_workers=num_workers)
    list(loader)
    (shard,) = loader.reader.path.glob("*.mds")
    whole = shard.read_bytes()
    flip_a_bit(shard, where)
    again = loader_of(ADDRESS, num_workers=num_workers)  # as the next run
    with pytest.warns(UserWarning, match=r"damaged in the cache .*fetched again from s3://bucket"):
        got = list(again)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(want, got, strict=True) for key in a)
    assert shard.read_bytes() == whole and shard_gets(server) == [2]
    assert not again.bad


def test_damage_in_the_bucket_itself_is_said_after_one_more_download(
    upload: Any, server: FlakyS3, stored: Any
) -> None:
    client = upload(stored("mds"))
    reader = loader_of(ADDRESS).reader
    list(loader_of(ADDRESS))
    (shard,) = reader.path.glob("*.mds")
    flip_a_bit(shard)
    client.upload_file(str(shard), "bucket", f"set/{shard.name}")
    said = rf"shard {ADDRESS}/{shard.name}: .* does not match the data set's description"
    with pytest.warns(UserWarning, match="fetched again"), pytest.raises(UserError, match=said):
        list(loader_of(ADDRESS))
    assert shard_gets(server) == [3] and not shard.exists()


def test_a_sample_damaged_before_it_was_described_is_not_fetched_for_ever(
    upload: Any, server: FlakyS3, stored: Any, tmp_path: Path
) -> None:
    """The shard is what its description says, the sample is not."""
    source = shutil.copytree(stored("mds"), tmp_path / "source")
    note = json.loads((source / "pospre.json").read_text())
    sums = np.frombuffer(base64.b64decode(note["crc32c"]), "<u4").copy()
    sums[2] ^= 1
    note["crc32c"] = base64.b64encode(sums.tobytes()).decode()
    (source / "pospre.json").write_text(json.dumps(note))
    upload(source)
    refuses(rf"{ADDRESS}/\S+, sample 2 .*Copy the data set to", lambda: list(loader_of(ADDRESS)))
    with pytest.warns(UserWarning, match="sample 2"):
        loader = loader_of(ADDRESS, bad_samples="skip")
        for _ in range(6):
            list(loader)
    assert shard_gets(server) == [1] and set(loader.bad) == {2}


def test_ranks_that_lag_keep_their_shards(bucket: Any, server: FlakyS3) -> None:
    ranks = [open_remote(cache_limit=4 * 25_000) for _ in range(2)]
    order = epoch_order(0, 0, ranks[0].parts, "windows", 7)
    for number, reader in enumerate(ranks):
        reader.expect(order[number::2])
    lag = 3  # samples
    for step in range(NUM_SAMPLES // 2 + lag):
        check(ranks[0], order[0::2][step : step + 1])
        if step >= lag:
            check(ranks[1], order[1::2][step - lag : step - lag + 1])
    assert shard_gets(server) == [1] * 5


def test_a_loader_is_left_while_it_waits(bucket: Any, server: FlakyS3) -> None:
    loader = build_loader(
        ADDRESS, views=[ViewGroup("view", 1, (8, 8))], batch_size=4, seed=0, num_workers=2
    )
    for number in range(5):
        server.spoil_always(f"shard.0000{number}.mds", Fault(pause=30))
    batches = iter(loader)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # Composer, once imported, makes it exit
        next(batches)
    del batches
    assert time.monotonic() - start < 25


def test_limits_and_orders(bucket: Any) -> None:
    refuses(r"cache_limit = 30000 is less than two shards", lambda: open_remote(cache_limit=30_000))
    reader = open_remote(cache_limit=100_000)

    def visits(order: str, window: int) -> Visits:
        return Visits(order, window, shard_groups=range(1), share=1.0, parts=np.arange(5))

    with pytest.raises(UserError, match=r"data.order = random needs all .* data.order: windows"):
        reader.prepare(visits("random", 16))
    with pytest.raises(UserError, match=r"the 8 shards .* data.window needs, 16 samples for each"):
        reader.prepare(visits("windows", 16))
    reader.prepare(visits("windows", 7))
    open_remote(cache_limit=1_000_000).prepare(visits("random", 16))
    open_remote().prepare(visits("random", 16))


def test_a_replaced_data_set_is_fetched_anew(bucket: Any, upload: Any, shards: Any) -> None:
    old = open_remote()
    check(old)
    upload(shards(hashes=["sha1"]))
    new = open_remote()
    assert new.path != old.path and old.path.is_dir() and not list(new.path.glob("*.mds"))
    check(new)
    check(old)
    abandoned = old.path
    old.close()
    OPEN.remove(old)
    del old
    open_remote()
    assert not abandoned.exists() and new.path.is_dir()


def test_a_full_disk_is_said(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    reader = open_remote()
    monkeypatch.setattr(os, "posix_fallocate", full)
    refuses(r"the disk of .* is full: .* needs \d+ bytes, but only \d+ are", lambda: reader.read(0))
    monkeypatch.undo()
    assert not list(reader.path.glob("shard*"))


def test_a_cache_that_cannot_be_written(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot be written .* data.cache_dir"):
        open_remote(cache_dir=tmp_path / "file")


def test_a_line_on_a_terminal(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(open_remote())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    reader = open_remote(cache_limit=60_000)
    for path in reader.path.glob("shard*"):
        path.unlink()
    check(reader)
    said = capsys.readouterr().err
    assert "shard.00000.mds" in said and "shard.00001.mds" not in said


# Processes

READ_ALL = """
import sys
from pospre.data.loader import build_loader
from pospre.data.order import epoch_order
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from pospre.errors import run_command
def main():
    reader = open_reader("s3://bucket/set")
    print("open", flush=True)
    for index in range(len(reader)):
        reader.read(index)
    print("read", reader.downloaded, flush=True)
    return 0
sys.exit(run_command(main))
"""


@contextmanager
def two_readers() -> "Iterator[list[subprocess.Popen[str]]]":
    command, root = [sys.executable, "-c", READ_ALL], Path(__file__).parents[3]
    with started(command, cwd=root) as first, started(command, cwd=root) as second:
        yield [first, second]


def test_processes_share_the_downloads(bucket: Any, server: FlakyS3) -> None:
    for name in ("shard.00000.mds", "shard.00001.mds"):
        server.spoil(name, Fault(drip=0.02))
    with two_readers() as processes:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert shard_gets(server) == [1] * 5


def test_after_killed_and_interrupted_runs(bucket: Any, server: FlakyS3) -> None:
    server.spoil_always("shard.00002.mds", Fault(drip=2))  # which makes 50 s of a shard
    with two_readers() as processes:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
        until(lambda: server.sent["shard.00002.mds"] > 0)
        for process, number in zip(processes, (signal.SIGKILL, signal.SIGINT), strict=True):
            process.send_signal(number)
        start = time.monotonic()
        outputs = [process.communicate(timeout=60) for process in processes]
    assert time.monotonic() - start < 40
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 130], outputs
    assert "Traceback" not in outputs[1][1]
    server.heal()
    reader = open_remote()
    assert not list(reader.path.glob("*.part"))
    check(reader)
    assert server.gets["shard.00002.mds"] == 1
