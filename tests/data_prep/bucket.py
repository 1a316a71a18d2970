"""A bucket of an own server, photographs to convert into it, and how to look at it."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import verify
from data_prep.publish.description import as_text
from pospre.errors import run_command
from tests.data_prep.reading import run
from tests.data_prep.sample_images import encoded, odd_files, picture, write_files

URI = "s3://bucket/photos"
KEY = re.compile(r"shard\.[0-9a-f]{16}\.")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from tests.data.flaky_s3 import moto_server  # takes its time

    with moto_server() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An empty bucket ``bucket``, and a place of our own for temporary files; gives a client."""
    from tests.data.flaky_s3 import use_bucket

    use_bucket(monkeypatch, endpoint)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    import boto3

    client: Any = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="bucket")
    yield client
    for key in keys(client, ""):
        client.delete_object(Bucket="bucket", Key=key)


def keys(client: Any, prefix: str = "photos/") -> list[str]:
    found = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return [item["Key"].removeprefix(prefix) for item in found]


def contents(client: Any) -> dict[str, bytes]:
    return {
        key: client.get_object(Bucket="bucket", Key=f"photos/{key}")["Body"].read()
        for key in keys(client)
    }


def as_in_a_folder(client: Any) -> dict[str, bytes]:
    """Return the contents, without the blocks' keys in the names of the shards."""
    found = {KEY.sub("shard.", name): data for name, data in contents(client).items()}
    for name in found:
        if name.endswith(".json"):
            found[name] = KEY.sub("shard.", found[name].decode()).encode()
    # sorted by the shards' names
    found["pospre.json"] = as_text(json.loads(found["pospre.json"])).encode()
    return found


def shard(client: Any, number: int) -> str:
    return next(key for key in keys(client) if key.endswith(f".{number:05d}.mds"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    more = {f"plain/{number}.jpg": encoded(picture(number)) for number in range(12)}
    return write_files(tmp_path / "source", odd_files() | more)


def verified() -> int:
    return run_command(lambda: verify.main([URI]))


def write(source: Path, target: Path | str, *options: object) -> int:
    return run(source, target, "--shard-mb", 0.03, *options)
