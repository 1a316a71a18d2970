"""A data set of five shards in a bucket behind a proxy that misbehaves on demand; its fixtures."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from filelock import FileLock

from pospre.data.opening import open_reader

if TYPE_CHECKING:
    from pospre.data.bucket.reader import RemoteMdsReader
    from tests.data.flaky_s3 import FlakyS3

NUM_SAMPLES = 40
ADDRESS = "s3://bucket/set"
OPEN: "list[RemoteMdsReader]" = []


@pytest.fixture(scope="module")
def server() -> "Iterator[FlakyS3]":
    from tests.data.flaky_s3 import flaky_s3  # moto takes its time

    with flaky_s3() as flaky:
        yield flaky


def content(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, 3000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="module")
def store(server: "FlakyS3") -> Iterator[Any]:
    """A client of the store behind the proxy, which has the bucket."""
    import boto3

    from tests.data.flaky_s3 import use_bucket

    with pytest.MonkeyPatch.context() as patch:
        use_bucket(patch, server.upstream)
        client: Any = boto3.client("s3", endpoint_url=server.upstream)
    client.create_bucket(Bucket="bucket")
    yield client
    for key in sums(client):
        client.delete_object(Bucket="bucket", Key=key)


def sums(client: Any) -> dict[str, str]:
    """Return the MD5 sums of what the bucket holds, by key."""
    found = client.list_objects_v2(Bucket="bucket").get("Contents", [])
    return {item["Key"]: item["ETag"].strip('"') for item in found}


@pytest.fixture
def upload(
    server: "FlakyS3", store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Path], Any]]:
    """Return ``upload(directory)``: let ADDRESS hold its files, and nothing else; give a client."""
    from tests.data.flaky_s3 import use_bucket

    # 60: a server that is slow for seconds is not asked again
    use_bucket(monkeypatch, server.url, patience=60)
    monkeypatch.setenv("POSPRE_CACHE", str(tmp_path / "cache"))
    server.heal()

    def put(directory: Path) -> Any:
        there, files = sums(store), {f"set/{path.name}": path for path in directory.iterdir()}
        for key in there.keys() - files:
            store.delete_object(Bucket="bucket", Key=key)
        for key, path in files.items():  # what the test before has left is not sent again
            if there.get(key) != hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest():
                store.upload_file(str(path), "bucket", key)
        return store

    yield put
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def bucket(upload: Callable[[Path], Any], shards: Callable[..., Path]) -> Any:
    """Serve the five shards; give a client."""
    return upload(shards())


def open_remote(**options: Any) -> "RemoteMdsReader":
    reader = open_reader(ADDRESS, **options)
    from pospre.data.bucket.reader import RemoteMdsReader

    assert isinstance(reader, RemoteMdsReader)
    OPEN.append(reader)
    return reader


def check(reader: "RemoteMdsReader", indices: Any = range(NUM_SAMPLES)) -> None:
    for index in indices:
        sample = reader.read(int(index))
        assert sample.encoded.numpy().tobytes() == content(int(index)) and sample.label == index


def shard_gets(server: "FlakyS3") -> list[int]:
    return [count for name, count in sorted(server.gets.items()) if "shard" in name]


def used(folder: Path) -> int:
    """Return the bytes of the shards and of what is on its way, at one moment."""
    sizes = {}
    with FileLock(folder.parent / "lock"):  # nothing is evicted or begun meanwhile
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # has its name now, or is given up
                if entry.name.startswith("shard"):  # one that gets its name meanwhile counts once
                    sizes[entry.name.removesuffix(".part")] = entry.stat().st_size
    return sum(sizes.values())
