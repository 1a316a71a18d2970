"""A conversion that stopped, and a source that has changed since: finished blocks stay."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.data_prep import bucket as remote
from tests.data_prep.reading import Says, run
from tests.data_prep.sample_images import encoded, picture, write_files
from tests.disk import snapshot

OPTIONS = ("--shard-mb", "0.16", "--strict")

PHOTO = encoded(picture())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs, and a damaged one among the last."""
    files = {f"a/{n}.jpg": PHOTO for n in range(100, 700)}
    return write_files(tmp_path / "photos", files | {"a/655_bad.jpg": b"\xff\xd8\xff bad"})


def num_reused(printed: str) -> int:
    found = re.search(r"(\d+) of \d+ blocks were already finished", printed)
    assert found is not None, printed
    return int(found[1])


def test_without_the_bad_file_it_goes_on(
    tmp_path: Path, photos: Path, refused: Says, printed: Says
) -> None:
    target = tmp_path / "on" / "out"
    message = refused(run, photos, target, *OPTIONS)
    assert "655_bad.jpg cannot be read" in message
    kept = int(message.split(" of ")[0])
    (photos / "a/655_bad.jpg").unlink()
    assert kept - 4 <= num_reused(printed(run, photos, target, *OPTIONS)) <= kept and kept >= 10
    fresh = tmp_path / "fresh" / "out"
    assert run(photos, fresh, *OPTIONS) == 0
    assert snapshot(target.parent) == snapshot(fresh.parent)


def test_in_a_bucket_too(bucket: Any, photos: Path, printed: Says) -> None:
    options = ("--shard-mb", "0.4", "--strict")  # fewer blocks
    assert run(photos, remote.URI, *options) == 2
    (photos / "a/655_bad.jpg").unlink()
    assert num_reused(printed(run, photos, remote.URI, *options)) >= 4
    there = remote.contents(bucket)
    assert run(photos, f"{remote.URI}2", *options) == 0
    fresh = {name: bucket.get_object(Bucket="bucket", Key=f"photos2/{name}") for name in there}
    assert {name: found["Body"].read() for name, found in fresh.items()} == there


def test_another_source_takes_nothing_over(tmp_path: Path, photos: Path, refused: Says) -> None:
    assert run(photos, tmp_path / "mds", *OPTIONS) == 2
    blocks = len(list((tmp_path / "mds.partial").glob("*.*.json")))
    other = {f"b/{n}.jpg": PHOTO for n in range(60)}
    assert "another conversion (made from other images" in refused(
        run, write_files(tmp_path / "other", other), tmp_path / "mds", *OPTIONS
    )
    (photos / "a/655_bad.jpg").unlink()  # a part may not change what others count on
    assert "another conversion (made from other images" in refused(
        run, photos, tmp_path / "mds", *OPTIONS, "--part", "1/2"
    )
    assert len(list((tmp_path / "mds.partial").glob("*.*.json"))) == blocks
