"""A conversion that stopped, and a source that has changed since: finished blocks stay."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data_prep import bucket as remote
from tests.data_prep.reading import run
from tests.data_prep.sample_images import encoded, picture, write_files

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
    tmp_path: Path,
    photos: Path,
    snapshot: Callable[[Path], dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "on" / "out"
    assert run(photos, target, *OPTIONS) == 2
    message = capsys.readouterr().err
    assert "655_bad.jpg cannot be read" in message
    kept = int(message.split(" of ")[0])
    (photos / "a/655_bad.jpg").unlink()
    assert run(photos, target, *OPTIONS) == 0
    assert kept - 4 <= num_reused(capsys.readouterr().out) <= kept and kept >= 10
    fresh = tmp_path / "fresh" / "out"
    assert run(photos, fresh, *OPTIONS) == 0
    assert snapshot(target.parent) == snapshot(fresh.parent)


def test_in_a_bucket_too(
    bucket: Any, tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(photos, remote.URI, *OPTIONS) == 2
    (photos / "a/655_bad.jpg").unlink()
    assert run(photos, remote.URI, *OPTIONS) == 0
    assert num_reused(capsys.readouterr().out) >= 10
    there = remote.contents(bucket)
    assert run(photos, f"{remote.URI}2", *OPTIONS) == 0
    assert run(photos, remote.URI, *OPTIONS, "--overwrite") == 0
    assert remote.contents(bucket) == there
    fresh = {name: bucket.get_object(Bucket="bucket", Key=f"photos2/{name}") for name in there}
    assert {name: found["Body"].read() for name, found in fresh.items()} == there


def test_another_source_takes_nothing_over(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(photos, tmp_path / "mds", *OPTIONS) == 2
    blocks = len(list((tmp_path / "mds.partial/blocks").iterdir()))
    other = {f"b/{n}.jpg": PHOTO for n in range(60)}
    assert run(write_files(tmp_path / "other", other), tmp_path / "mds", *OPTIONS) == 2
    assert "another conversion (made from other images" in capsys.readouterr().err
    (photos / "a/655_bad.jpg").unlink()  # a part may not change what others count on
    assert run(photos, tmp_path / "mds", *OPTIONS, "--part", "1/2") == 2
    assert "another conversion (made from other images" in capsys.readouterr().err
    assert len(list((tmp_path / "mds.partial/blocks").iterdir())) == blocks
