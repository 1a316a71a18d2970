"""Data sets in a bucket that are replaced, by one conversion or by two at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.distribute.conversion import convert as convert_source
from data_prep.plan.records import Record, Settings
from data_prep.publish.bucket import BucketShards
from pospre.errors import UserError
from pospre.object_store import Bucket
from tests.data_prep.bucket import URI, contents, keys, shard, verified, write
from tests.data_prep.reading import Says


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
        patch.setattr("data_prep.distribute.preparation.check_writers", no_library)
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
        store.begin(type(plan)(**{**vars(plan), "num_items": 9}))

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
