"""Conversion straight into a bucket, over HTTP."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError

from data_prep import verify
from data_prep.plan.records import Record
from data_prep.publish import bucket as remote
from data_prep.publish.bucket import BucketShards
from pospre.data.opening import open_reader
from pospre.errors import run_command
from tests.data.flaky_s3 import FlakyS3, flaky_s3, use_bucket
from tests.data_prep.bucket import URI, as_in_a_folder, contents, keys, shard, write
from tests.data_prep.reading import call


def test_the_bucket_holds_what_a_folder_would(
    bucket: Any,
    source: Path,
    tmp_path: Path,
    snapshot: Callable[[Path], dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert write(source, tmp_path / "local") == 0
    assert write(source, URI, "--workers", 2, "--verify") == 0
    assert "ok: 27 decoded" in capsys.readouterr().out
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")
    here = open_reader(tmp_path / "local")
    there = open_reader(URI, cache_dir=tmp_path / "cache")
    assert len(there) == 27 and there.classes == here.classes
    for index in (0, 13, 26):
        assert there.read(index).encoded.tolist() == here.read(index).encoded.tolist()
    there.close()
    assert not list((tmp_path / "temporary").iterdir())
    assert write(source, URI) == 0
    assert "already holds this conversion" in capsys.readouterr().out
    assert write(source, URI, "--quality", 50) == 2
    assert "made with quality=90 instead of 50" in capsys.readouterr().err
    assert write(source, URI, "--quality", 50, "--overwrite") == 0
    assert verify.main([URI]) == 0
    assert not [key for key in keys(bucket) if key.startswith(".pospre")]


def test_stock_streaming_reads_the_bucket(bucket: Any, source: Path, tmp_path: Path) -> None:
    from streaming import StreamingDataset

    assert write(source, URI) == 0
    data = StreamingDataset(
        remote=URI,
        local=str(tmp_path / "cache"),
        shuffle=False,
        batch_size=1,
        validate_hash="sha256",
    )
    assert [sample["path"] for sample in data] == sorted(
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    )


def test_parts_and_merge(
    bucket: Any,
    source: Path,
    tmp_path: Path,
    snapshot: Callable[[Path], dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert write(source, tmp_path / "local") == 0
    assert write(source, URI, "--part", "2/2") == 0
    assert "index.json" not in keys(bucket)
    assert call("--merge", URI) == 2
    assert "lacks part 1/2" in capsys.readouterr().err
    assert write(source, URI, "--part", "1/2") == 0
    shards = {key: data for key, data in contents(bucket).items() if key.startswith("shard.")}
    assert call("--merge", URI) == 0
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")
    assert shards.items() <= contents(bucket).items()
    assert call("--merge", URI) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_an_interrupted_upload_goes_on(
    bucket: Any,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    snapshot: Callable[[Path], dict[str, bytes]],
) -> None:
    assert write(source, tmp_path / "local") == 0
    keep = BucketShards.keep
    kept: list[int] = []

    def stop_at_the_fourth(self: BucketShards, folder: Path, record: Record) -> None:
        # bounded: no shard but this one lies here
        assert len(list((tmp_path / "temporary").rglob("*.mds"))) == 1
        if len(kept) == 3:
            raise KeyboardInterrupt
        keep(self, folder, record)
        kept.append(record.number)

    monkeypatch.setattr(BucketShards, "keep", stop_at_the_fourth)
    assert write(source, URI) == 130
    assert "3 of " in capsys.readouterr().err
    assert not {"index.json", "pospre.json"} & set(keys(bucket))
    monkeypatch.undo()
    use_bucket(monkeypatch, bucket.meta.endpoint_url)
    # one of the shards did not arrive in full
    bucket.put_object(Bucket="bucket", Key=f"photos/{shard(bucket, 1)}", Body=b"half")
    assert write(source, URI) == 0
    assert "2 of " in capsys.readouterr().out
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")


def test_a_prefix_that_is_taken(
    bucket: Any, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put_object(Bucket="bucket", Key="photos/thesis.tex", Body=b"x")
    for options in ([], ["--overwrite"], ["--part", "1/2"]):
        assert write(source, URI, *options) == 2
        assert "has other objects (thesis.tex)" in capsys.readouterr().err
    bucket.put_object(Bucket="bucket", Key="photos/index.json", Body=b'{"shards": []}')
    for options in ([], ["--overwrite"]):
        assert write(source, URI, *options) == 2
        assert "not made by this command" in capsys.readouterr().err
    assert keys(bucket) == ["index.json", "thesis.tex"]


def test_verify_names_what_changed(
    bucket: Any, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verified() -> str:
        assert run_command(lambda: verify.main([URI])) == 2
        return capsys.readouterr().err

    assert "index.json does not exist" in verified()
    assert write(source, URI) == 0
    whole = contents(bucket)
    name = shard(bucket, 2)
    data = bytearray(whole[name])
    data[-9] ^= 1
    bucket.put_object(Bucket="bucket", Key=f"photos/{name}", Body=bytes(data))
    assert f"{URI}/{name} does not match the data set's description" in verified()
    bucket.delete_object(Bucket="bucket", Key=f"photos/{name}")
    assert f"{URI}/{name} is missing" in verified()
    assert write(source, URI) == 2
    assert f"{URI}/{name} is missing" in capsys.readouterr().err
    del whole["index.json"]
    bucket.delete_object(Bucket="bucket", Key="photos/index.json")
    assert "index.json does not exist" in verified()


def test_no_bucket(
    bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(source, "s3://nowhere/photos") == 2
    assert "bucket 'nowhere' does not exist" in capsys.readouterr().err
    assert call(source, "s3://bucket/a.beton", "--format", "ffcv") == 2
    assert "only MDS shards can go to a bucket" in capsys.readouterr().err


def test_a_dead_endpoint_is_said_at_once(
    bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    start = time.monotonic()
    assert write(source, URI) == 69
    assert "the S3 endpoint http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert time.monotonic() - start < 20


def test_an_upload_that_fails_keeps_the_rest(
    bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pospre.object_store import Bucket

    put = Bucket.put

    def failing(self: Bucket, name: str, content: bytes) -> None:
        if name.endswith(".00002.json"):
            raise EndpointConnectionError(endpoint_url="http://there")
        put(self, name, content)

    monkeypatch.setattr(Bucket, "put", failing)
    assert write(source, URI) == 69
    message = capsys.readouterr().err
    assert "does not answer" in message and "2 of " in message and "Traceback" not in message
    monkeypatch.setattr(Bucket, "put", put)
    assert write(source, URI) == 0
    assert verify.main([URI]) == 0


@pytest.fixture
def flaky(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyS3]:
    with flaky_s3() as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def there(flaky: FlakyS3) -> Any:
    """A client that no fault stands before, of the store behind; it has the bucket."""
    client: Any = boto3.client("s3", endpoint_url=flaky.upstream)
    client.create_bucket(Bucket="bucket")
    return client


def test_a_storm_of_503s_is_waited_out(
    there: Any,
    flaky: FlakyS3,
    source: Path,
    tmp_path: Path,
    snapshot: Callable[[Path], dict[str, bytes]],
) -> None:
    """Of every object the first write is refused: shards, records and descriptions."""
    flaky.refused_writes = 1
    assert write(source, URI) == 0
    assert sum(count > 1 for count in flaky.writes.values()) >= 2 * len(keys(there)) - 2
    assert write(source, tmp_path / "local") == 0
    assert as_in_a_folder(there) == snapshot(tmp_path / "local")


def test_a_store_that_stays_busy_ends_the_upload_with_the_cause(
    there: Any,
    flaky: FlakyS3,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "_TRIES", 2)
    flaky.refused_writes = 1000
    assert write(source, URI) == 69
    message = capsys.readouterr().err
    assert "503" in message or "SlowDown" in message
    assert "s3://bucket/photos" in message and "Traceback" not in message
    flaky.heal()
    assert write(source, URI) == 0
    assert verify.main([URI]) == 0


def test_a_store_that_takes_no_shard_may_take_it_later(
    there: Any,
    flaky: FlakyS3,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote, "_TRIES", 1)
    monkeypatch.setattr(flaky, "refuses_write", lambda place: "/shard." in place)
    assert write(source, URI) == 69
    assert "http://127.0.0.1:" in (message := capsys.readouterr().err) and "SlowDown" in message


def test_description_is_last(bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pospre.object_store import Bucket

    put, names = Bucket.put, []

    def noted(self: Bucket, name: str, content: bytes) -> None:
        put(self, name, content)
        names.append(name)

    monkeypatch.setattr(Bucket, "put", noted)
    assert write(source, URI) == 0
    assert names[0].startswith(".pospre-probe")
    assert names[-2:] == ["pospre.json", "index.json"]
    assert json.loads(contents(bucket)["index.json"])["version"] == 2
