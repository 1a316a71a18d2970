"""MDS shards in a bucket: what is fetched, when, how often, and what is said when it fails."""

import contextlib
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch

from pospre.data.loader import build_loader
from pospre.data.order import epoch_order
from pospre.data.reader import open_reader
from pospre.data.remote import RemoteMdsReader
from pospre.data.views import ViewGroup
from pospre.errors import UserError
from tests.data.flaky_s3 import Fault, FlakyS3, flaky_s3

NUM_SAMPLES = 40
ADDRESS = "s3://bucket/set"
OPEN: list[RemoteMdsReader] = []


@pytest.fixture(scope="module")
def server() -> Iterator[FlakyS3]:
    with flaky_s3() as flaky:
        yield flaky


def content(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, 3000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``shards(**options of MDSWriter)``: a directory of five shards of eight samples."""
    streaming = pytest.importorskip("streaming")
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        name = json.dumps(options)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("mds")
            columns = {"image": "bytes", "label": "int"}
            with streaming.MDSWriter(
                out=str(made[name]), columns=columns, size_limit=25_000, **options
            ) as writer:
                for number in range(NUM_SAMPLES):
                    writer.write({"image": content(number), "label": number})
        return made[name]

    return make


@pytest.fixture
def upload(
    server: FlakyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shards: Any
) -> Iterator[Callable[..., Any]]:
    """Return ``upload(directory)``: put its files at ADDRESS; give a client."""
    for name, value in {
        "S3_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret-of-nobody",
        "AWS_DEFAULT_REGION": "us-east-1",
        "POSPRE_CACHE": str(tmp_path / "cache"),
        "POSPRE_S3_PATIENCE": "10",
    }.items():
        monkeypatch.setenv(name, value)
    server.heal()
    made = []

    def put(directory: Path) -> Any:
        client: Any = boto3.client("s3", endpoint_url=server.upstream)
        client.create_bucket(Bucket="bucket")
        made.append(client)
        for path in directory.iterdir():
            client.upload_file(str(path), "bucket", f"set/{path.name}")
        return client

    yield put
    while OPEN:
        OPEN.pop().close()
    for client in made:
        for item in client.list_objects_v2(Bucket="bucket").get("Contents", []):
            client.delete_object(Bucket="bucket", Key=item["Key"])


@pytest.fixture
def bucket(upload: Callable[[Path], Any], shards: Callable[..., Path]) -> Any:
    """Serve the five shards; give a client."""
    return upload(shards())


def open_remote(**options: Any) -> RemoteMdsReader:
    reader = open_reader(ADDRESS, **options)
    assert isinstance(reader, RemoteMdsReader)
    OPEN.append(reader)
    return reader


def check(reader: RemoteMdsReader, indices: Any = range(NUM_SAMPLES)) -> None:
    for index in indices:
        sample = reader.read(int(index))
        assert sample.encoded.numpy().tobytes() == content(int(index)) and sample.label == index


def shard_gets(server: FlakyS3) -> list[int]:
    return [count for name, count in sorted(server.gets.items()) if "shard" in name]


def test_samples_are_those_of_the_local_shards(bucket: Any, server: FlakyS3) -> None:
    reader = open_remote()
    assert (len(reader), reader.format) == (NUM_SAMPLES, "mds")
    assert reader.parts.tolist() == [8, 16, 24, 32, 40]
    assert shard_gets(server) == []
    check(reader)
    assert shard_gets(server) == [1] * 5
    assert reader.downloaded == sum(path.stat().st_size for path in reader.path.glob("*.mds"))
    assert reader.name(9) == "s3://bucket/set/shard.00001.mds, sample 1"
    reader.close()
    server.heal()
    again = open_remote()
    check(again)
    assert shard_gets(server) == [] and again.downloaded == 0


# What arrives


@pytest.mark.parametrize(
    "options",
    [{"compression": "zstd", "hashes": ["sha1", "xxh64"]}, {"compression": "gz"}, {}],
    ids=["zstd and hashes", "gz", "plain"],
)
def test_compressed_and_hashed_shards(upload: Any, shards: Any, options: dict[str, Any]) -> None:
    upload(shards(**options))
    reader = open_remote()
    check(reader)
    assert {path.suffix for path in reader.path.glob("shard*")} == {".mds"}


@pytest.mark.parametrize("options", [{"hashes": ["sha1"]}, {"compression": "zstd"}, {}])
def test_damaged_shards_are_fetched_once_more(
    upload: Any, shards: Any, server: FlakyS3, options: dict[str, Any], tmp_path: Path
) -> None:
    source = shards(**options)
    client = upload(source)
    if not options:  # as our converter writes them: with a manifest
        client.put_object(Bucket="bucket", Key="set/pospre.json", Body=describe(source))
    name = next(source.glob("shard.00001*")).name
    server.spoil(name, Fault(flip=True))
    reader = open_remote()
    check(reader)
    assert server.gets[name] == 2
    server.spoil_always(name, Fault(flip=True))
    reader = open_remote(cache_dir=tmp_path / "other")
    with pytest.raises(UserError, match=f"{ADDRESS}/{name} is not what .* downloaded twice"):
        reader.read(9)
    check(reader, [0, 39])
    assert not list(reader.path.glob("shard.00001*"))


def describe(source: Path) -> bytes:
    """Return a ``pospre.json``."""
    files = {
        path.name: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in source.glob("*.mds")
    }
    return json.dumps(
        {"format": "pospre-mds", "version": 1, "samples": NUM_SAMPLES, "manifest": files}
    ).encode()


def test_shards_of_another_size_or_name_are_refused(
    bucket: Any, upload: Any, shards: Any, tmp_path: Path
) -> None:
    bucket.put_object(Bucket="bucket", Key="set/shard.00002.mds", Body=b"cut")
    with pytest.raises(UserError, match=r"set/shard.00002.mds has 3 bytes instead of"):
        open_remote()
    bucket.delete_object(Bucket="bucket", Key="set/shard.00002.mds")
    with pytest.raises(UserError, match=r"set/shard.00002.mds is missing"):
        open_remote()
    index = json.loads((shards() / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = "../../outside.mds"
    bucket.put_object(Bucket="bucket", Key="set/index.json", Body=json.dumps(index).encode())
    with pytest.raises(UserError, match=r"without a valid 'raw_data'"):
        open_remote()


# Faults of the network


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(status=503)] * 3,
        [Fault(status=500), Fault(status=429)],
        [Fault(cut_after=0), Fault(cut_after=10_000)],
        [Fault(pause=2.0)],
    ],
    ids=["503", "500 and 429", "cut", "silent"],
)
def test_faults_that_pass(
    bucket: Any, server: FlakyS3, faults: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "6")  # which makes 1.5 s a long silence
    reader = open_remote()
    server.spoil("shard.00001.mds", *faults)
    check(reader, range(8, 16))
    assert server.gets["shard.00001.mds"] == len(faults) + 1
    if faults[-1].cut_after:  # what came before the cut is not sent again
        assert server.sent["shard.00001.mds"] == (reader.path / "shard.00001.mds").stat().st_size


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(status=503), r"gave up after \d+ attempts in \d+ s; .* answered 503"),
        (Fault(cut_after=500), r"the connection was cut after \d+ bytes"),
        (Fault(pause=9), r"the server went silent|came in \d attempts"),
        (Fault(drip=0.3), r"\d+ of \d+ bytes came in 1 attempts|the server .* was too slow"),
    ],
    ids=["503", "cut", "silent", "drip"],
)
def test_waiting_is_bounded(
    bucket: Any, server: FlakyS3, fault: Fault, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "1")
    monkeypatch.setenv("RANK", "3")
    reader = open_remote()
    server.spoil_always("shard.00001.mds", fault)
    start = time.monotonic()
    whole = rf"rank 3 waited \d\.\d s for shard {ADDRESS}/shard.00001.mds: .*({said})"
    with pytest.raises(UserError, match=whole) as caught:
        reader.read(9)
    assert time.monotonic() - start < 2.5 and "secret-of-nobody" not in str(caught.value)
    server.heal()
    start = time.monotonic()
    reader.close()
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize(
    ("status", "said"), [(403, "may not be read"), (404, "does not exist"), (400, "answers")]
)
def test_faults_that_stay_are_said_at_once(
    bucket: Any, server: FlakyS3, status: int, said: str
) -> None:
    reader = open_remote()
    server.spoil_always("shard.00001.mds", Fault(status=status))
    start = time.monotonic()
    with pytest.raises(UserError, match=rf"{ADDRESS}/shard.00001.mds.*{said}"):
        reader.read(9)
    assert time.monotonic() - start < 2 and server.gets["shard.00001.mds"] == 1
    check(reader, [0, 39])


def test_opening_says_what_is_missing(
    bucket: Any, server: FlakyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.spoil_always("pospre.json", Fault(status=403))  # of a bucket that may not be listed
    assert len(open_remote()) == NUM_SAMPLES
    with pytest.raises(UserError, match=r"set/none/index.json does not exist: .* no folder of MDS"):
        open_reader(f"{ADDRESS}/none")
    with pytest.raises(UserError, match=r"bucket 'nowhere' does not exist"):
        open_reader("s3://nowhere/set")
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "soon")
    with pytest.raises(UserError, match=r"POSPRE_S3_PATIENCE is 'soon'"):
        open_remote()
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "1")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"127.0.0.1:9 does not answer"):
        open_remote()


# The cache


def test_what_is_expected_comes_ahead(bucket: Any, server: FlakyS3) -> None:
    reader = open_remote()
    reader.expect(np.array([33, 34, 1]))
    wait_for(lambda: len(list(reader.path.glob("*.mds"))) == 2)
    assert set(server.gets) - {"index.json", "pospre.json", "set", "bucket"} == {
        "shard.00000.mds",
        "shard.00004.mds",
    }
    reader.close()
    with pytest.raises(UserError, match=r"reading was ended"):
        reader.read(9)
    reader.expect(np.arange(NUM_SAMPLES))
    check(reader)
    reader.close()
    assert not [thread for thread in threading.enumerate() if "pospre-fetch" in thread.name]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_closing_ends_those_who_wait(bucket: Any, server: FlakyS3) -> None:
    reader = open_remote()
    server.spoil_always("shard.00001.mds", Fault(pause=5))
    said: list[str] = []

    def read() -> None:
        with pytest.raises(UserError) as caught:
            reader.read(9)
        said.append(str(caught.value))

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: server.gets["shard.00001.mds"] == 1)
    start = time.monotonic()
    reader.close()
    thread.join()
    assert time.monotonic() - start < 1.5 and "reading was ended" in said[0]


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


def test_a_limit_is_kept(bucket: Any, server: FlakyS3) -> None:
    size = 25_000
    reader = open_remote(cache_limit=3 * size)
    order = np.arange(NUM_SAMPLES)
    most = 0
    for _ in range(2):
        reader.expect(order)
        for index in order:
            check(reader, [index])
            most = max(most, used(reader.path))
        reader.close()
    assert 2 * size < most <= 3 * size
    assert sum(shard_gets(server)) <= 9  # the second epoch finds some of the first one's shards


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_the_local_shards(
    upload: Any, server: FlakyS3, stored: Any, num_workers: int
) -> None:
    upload(stored("mds"))
    settings: dict[str, Any] = {"views": [ViewGroup("view", 2, (16, 16))], "batch_size": 4}
    settings |= {"seed": 1, "order": "windows", "window": 7, "num_workers": num_workers}
    local = build_loader(stored("mds"), **settings)
    remote = build_loader(ADDRESS, **settings)
    for here, there in zip(local, remote, strict=True):
        assert all(torch.equal(here[key], there[key]) for key in here)
    assert shard_gets(server) == [1]


def test_a_loader_is_left_while_it_waits(bucket: Any, server: FlakyS3) -> None:
    loader = build_loader(
        ADDRESS, views=[ViewGroup("view", 1, (8, 8))], batch_size=4, seed=0, num_workers=2
    )
    for number in range(5):
        server.spoil_always(f"shard.0000{number}.mds", Fault(pause=6))
    batches = iter(loader)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    del batches
    assert time.monotonic() - start < 3


def used(folder: Path) -> int:
    """Return the bytes of the shards and of what is on its way."""
    total = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            total += entry.stat().st_size if entry.name.startswith("shard") else 0
    return total


def test_limits_and_orders(bucket: Any) -> None:
    with pytest.raises(UserError, match=r"cache_limit = 30000 is less than two shards"):
        open_remote(cache_limit=30_000)
    reader = open_remote(cache_limit=100_000)
    with pytest.raises(UserError, match=r"data.order = random needs all .* data.order: windows"):
        reader.check_order("random", 16)
    with pytest.raises(UserError, match=r"the 8 shards .* data.window = 16 needs"):
        reader.check_order("windows", 16)
    reader.check_order("windows", 7)
    open_remote(cache_limit=1_000_000).check_order("random", 16)
    open_remote().check_order("random", 16)


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
    with pytest.raises(UserError, match=r"the disk of .* is full: .* needs \d+ bytes, and \d+ are"):
        reader.read(0)
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
from pospre.data.reader import open_reader
from pospre.data.views import ViewGroup
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


def start_reading() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", READ_ALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_processes_share_the_downloads(bucket: Any, server: FlakyS3) -> None:
    for name in ("shard.00000.mds", "shard.00001.mds"):
        server.spoil(name, Fault(drip=0.02))
    processes = [start_reading(), start_reading()]
    outputs = [process.communicate(timeout=30) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert shard_gets(server) == [1] * 5


def test_after_killed_and_interrupted_runs(bucket: Any, server: FlakyS3) -> None:
    server.spoil_always("shard.00002.mds", Fault(drip=0.5))
    processes = [start_reading(), start_reading()]
    wait_for(lambda: server.sent["shard.00002.mds"] > 0)
    for process, number in zip(processes, (signal.SIGKILL, signal.SIGINT), strict=True):
        process.send_signal(number)
    start = time.monotonic()
    outputs = [process.communicate(timeout=10) for process in processes]
    assert time.monotonic() - start < 4
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 130], outputs
    assert "Traceback" not in outputs[1][1]
    server.heal()
    reader = open_remote()
    assert not list(reader.path.glob("*.part"))
    check(reader)
    assert server.gets["shard.00002.mds"] == 1
