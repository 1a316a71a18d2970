"""Conversion straight into a bucket, over HTTP."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from data_prep.distribute.conversion import convert as convert_source
from data_prep.plan.records import Record, Settings
from data_prep.publish import bucket as remote
from data_prep.publish.bucket import BucketShards
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.object_store import Bucket
from tests.data.flaky_s3 import FlakyS3, use_bucket
from tests.data_prep.bucket import URI, as_in_a_folder, contents, keys, shard, verified, write
from tests.data_prep.reading import Says, call
from tests.disk import snapshot


def test_the_bucket_holds_what_a_folder_would(
    bucket: Any, source: Path, tmp_path: Path, refused: Says, printed: Says
) -> None:
    assert write(source, tmp_path / "local") == 0
    assert "ok: 27 decoded" in printed(write, source, URI, "--workers", 2, "--verify")
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")
    here = open_reader(tmp_path / "local")
    there = open_reader(URI, cache_dir=tmp_path / "cache")
    assert len(there) == 27 and there.classes == here.classes
    for index in (0, 13, 26):
        assert there.read(index).encoded.tolist() == here.read(index).encoded.tolist()
    there.close()
    assert not list((tmp_path / "temporary").iterdir())
    assert "already holds this conversion" in printed(write, source, URI)
    assert "made with quality=90 instead of 50" in refused(write, source, URI, "--quality", 50)
    assert write(source, URI, "--quality", 50, "--overwrite") == 0
    assert verified() == 0
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
    bucket: Any, source: Path, tmp_path: Path, refused: Says, printed: Says
) -> None:
    assert write(source, tmp_path / "local") == 0
    assert write(source, URI, "--part", "2/2") == 0
    assert "index.json" not in keys(bucket)
    assert "lacks part 1/2" in refused(call, "--merge", URI)
    assert write(source, URI, "--part", "1/2") == 0
    shards = {key: data for key, data in contents(bucket).items() if key.startswith("shard.")}
    assert call("--merge", URI) == 0
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")
    assert shards.items() <= contents(bucket).items()
    assert "nothing to do" in printed(call, "--merge", URI)


def test_an_interrupted_upload_goes_on(
    bucket: Any,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Says,
    printed: Says,
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
    assert "3 of " in refused(write, source, URI, code=130)
    assert not {"index.json", "pospre.json"} & set(keys(bucket))
    monkeypatch.undo()
    use_bucket(monkeypatch, bucket.meta.endpoint_url)
    # one of the shards did not arrive in full
    bucket.put_object(Bucket="bucket", Key=f"photos/{shard(bucket, 1)}", Body=b"half")
    assert "2 of " in printed(write, source, URI)
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")


def test_a_prefix_that_is_taken(bucket: Any, source: Path, refused: Says) -> None:
    bucket.put_object(Bucket="bucket", Key="photos/thesis.tex", Body=b"x")
    for options in ([], ["--overwrite"], ["--part", "1/2"]):
        assert "has other objects (thesis.tex)" in refused(write, source, URI, *options)
    bucket.put_object(Bucket="bucket", Key="photos/index.json", Body=b'{"shards": []}')
    for options in ([], ["--overwrite"]):
        assert "not made by this command" in refused(write, source, URI, *options)
    assert keys(bucket) == ["index.json", "thesis.tex"]


def test_verify_names_what_changed(bucket: Any, source: Path, refused: Says) -> None:
    assert "index.json does not exist" in refused(verified)
    assert write(source, URI) == 0
    whole = contents(bucket)
    name = shard(bucket, 2)
    data = bytearray(whole[name])
    data[-9] ^= 1
    bucket.put_object(Bucket="bucket", Key=f"photos/{name}", Body=bytes(data))
    assert f"{URI}/{name} does not match the data set's description" in refused(verified)
    bucket.delete_object(Bucket="bucket", Key=f"photos/{name}")
    assert f"{URI}/{name} is missing" in refused(verified)
    assert f"{URI}/{name} is missing" in refused(write, source, URI)


def test_no_bucket(bucket: Any, source: Path, refused: Says) -> None:
    assert "bucket 'nowhere' does not exist" in refused(write, source, "s3://nowhere/photos")


def test_a_dead_endpoint_is_said_at_once(
    bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    start = time.monotonic()
    said = refused(write, source, URI, code=69)
    assert "the S3 endpoint http://127.0.0.1:9 does not answer" in said
    assert time.monotonic() - start < 20


def test_an_upload_that_fails_keeps_the_rest(
    bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    put = Bucket.put

    def failing(self: Bucket, name: str, content: bytes) -> None:
        if name.endswith(".00002.json"):
            raise EndpointConnectionError(endpoint_url="http://there")
        put(self, name, content)

    monkeypatch.setattr(Bucket, "put", failing)
    message = refused(write, source, URI, code=69)
    assert "does not answer" in message and "2 of " in message and "Traceback" not in message
    monkeypatch.setattr(Bucket, "put", put)
    assert write(source, URI) == 0
    assert verified() == 0


@pytest.fixture
def flaky(bucket: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyS3]:
    """A proxy before the bucket, which misbehaves for all but ``bucket`` itself."""
    with closing(FlakyS3(int(endpoint.rpartition(":")[2]))) as server:
        monkeypatch.setenv("S3_ENDPOINT_URL", server.url)
        yield server


def test_a_storm_of_503s_is_waited_out(
    bucket: Any, flaky: FlakyS3, photos: Path, tmp_path: Path
) -> None:
    """Of every object the first write is refused: shards, records and descriptions."""
    flaky.refused_writes = 1
    assert write(photos, URI) == 0
    assert sum(count > 1 for count in flaky.writes.values()) >= 2 * len(keys(bucket)) - 2
    assert write(photos, tmp_path / "local") == 0
    assert as_in_a_folder(bucket) == snapshot(tmp_path / "local")


@pytest.mark.parametrize("refused_place", ["/", "/shard."])
def test_a_store_that_stays_busy_ends_the_upload_with_the_cause(
    flaky: FlakyS3, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Says, refused_place: str
) -> None:
    monkeypatch.setattr(remote, "_TRIES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(flaky, "refuses_write", lambda place: refused_place in place)
        message = refused(write, source, URI, code=69)
    assert "503" in message or "SlowDown" in message
    assert URI in message or flaky.url in message
    assert "Traceback" not in message
    assert write(source, URI) == 0
    assert verified() == 0


def test_description_is_last(bucket: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, names = Bucket.put, []

    def noted(self: Bucket, name: str, content: bytes) -> None:
        put(self, name, content)
        names.append(name)

    monkeypatch.setattr(Bucket, "put", noted)
    assert write(source, URI) == 0
    assert names[0].startswith(".pospre-probe")
    assert names[-2:] == ["pospre.json", "index.json"]
    assert json.loads(contents(bucket)["index.json"])["version"] == 2


# Data sets in a bucket that are replaced, by one conversion or by two at once


@pytest.fixture
def few(photos: Path, bucket: Any) -> Path:
    """The photographs, which lie in the bucket too."""
    assert write(photos, URI) == 0
    return photos


def failing_at(number: int) -> Callable[[BucketShards, Path, Record], None]:
    keep = BucketShards.keep

    def fail(self: BucketShards, folder: Path, record: Record) -> None:
        if record.number == number:
            raise UserError("the disk is full")
        keep(self, folder, record)

    return fail


def no_library(name: str) -> None:
    raise UserError(f"{name} cannot be loaded")


def test_the_old_one_stays_until_the_new_one_is_there(
    bucket: Any, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = contents(bucket)
    new = (few, URI, "--quality", 50, "--max-side", 40, "--overwrite")
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.distribute.conversion.check_writers", no_library)
        assert write(*new) == 2
    assert contents(bucket) == old
    with monkeypatch.context() as patch:
        patch.setattr(BucketShards, "keep", failing_at(1))
        assert write(*new) == 2
    assert old.items() <= contents(bucket).items() and len(keys(bucket)) > len(old)
    assert verified() == 0
    assert write(*new) == 0
    assert not set(keys(bucket)) & set(old) - {"index.json", "pospre.json"}
    assert not [key for key in keys(bucket) if key.startswith(".pospre")]
    assert verified() == 0
    whole = contents(bucket)
    assert write(*new) == 0  # the same again: under the same names
    assert contents(bucket) == whole


def test_killed_between_description_and_index(
    bucket: Any, few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = contents(bucket)
    put = Bucket.put

    def fail(self: Bucket, name: str, content: bytes) -> None:
        if name == "index.json":
            raise KeyboardInterrupt
        put(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", fail)
        assert write(few, URI, "--quality", 50, "--overwrite") == 130
    assert contents(bucket)["index.json"] == old["index.json"]
    assert write(few, URI, "--quality", 50) == 0
    assert not set(keys(bucket)) & set(old) - {"index.json", "pospre.json"}
    assert verified() == 0


def test_what_others_did_meanwhile_is_seen_before_the_index_goes_up(
    bucket: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    publish = BucketShards.publish
    meanwhile: Callable[[], Any] = lambda: None  # noqa: E731

    def later(self: BucketShards, *arguments: Any) -> None:
        meanwhile()
        publish(self, *arguments)

    monkeypatch.setattr(BucketShards, "publish", later)

    def said(*options: object) -> str:
        return refused(write, photos, URI, *options)

    def remove() -> None:
        bucket.delete_object(Bucket="bucket", Key=f"photos/{shard(bucket, 0)}")

    meanwhile = remove
    assert "is missing. Run the same command again" in said()
    assert "index.json" not in keys(bucket)

    def cut() -> None:
        bucket.put_object(Bucket="bucket", Key=f"photos/{shard(bucket, 0)}", Body=b"cut")

    meanwhile = cut
    assert "has 3 bytes instead of" in said()

    def take_over() -> None:
        monkeypatch.setattr(BucketShards, "publish", publish)
        settings = Settings("mds", quality=50)
        convert_source(photos, URI, settings, num_workers=1, overwrite=True)

    meanwhile = take_over
    assert "has another data set" in said()
    assert verified() == 0

    def begin() -> None:
        store = BucketShards(URI)
        plan = store.plan()
        assert plan is not None
        store.discard()
        store.begin(type(plan)(**{**vars(plan), "about": {}}))

    meanwhile = begin
    monkeypatch.setattr(BucketShards, "publish", later)
    whole = contents(bucket)
    assert "another conversion has taken" in said("--overwrite")
    assert whole.items() <= contents(bucket).items()


def test_two_that_begin_at_once(
    bucket: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    assert write(photos, URI, "--part", "1/2") == 0
    plan, looks = BucketShards.plan, []

    def not_yet(self: BucketShards) -> Any:
        looks.append(self)
        return plan(self) if len(looks) > 1 else None

    monkeypatch.setattr(BucketShards, "plan", not_yet)
    assert "unfinished work of another conversion (made with quality=90" in refused(
        write, photos, URI, "--part", "2/2", "--quality", 50
    )


def test_a_damaged_description_is_said(bucket: Any, few: Path, refused: Says) -> None:
    for text in (b"{not json", b"[]", b"{}", b'{"format": "pospre-mds", "version": 1}'):
        bucket.put_object(Bucket="bucket", Key="photos/pospre.json", Body=text)
        before = contents(bucket)
        for options in ([], ["--overwrite"]):
            message = refused(write, few, URI, *options)
            assert f"{URI}/pospre.json" in message and "choose another DST" in message
        assert contents(bucket) == before
