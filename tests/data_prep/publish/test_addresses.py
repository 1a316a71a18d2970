"""Local destinations that look like addresses, and an address with one slash."""

from pathlib import Path

import pytest

from tests.data_prep.reading import Says, read_samples
from tests.data_prep.reading import run as write


@pytest.mark.parametrize("name", ["v2:photos", "dbfs:/mnt/photos", "gs:photos"])
def test_a_local_name_with_a_colon_is_a_local_name(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write(photos, name) == 0
    assert len(read_samples(tmp_path / name)) == 12


def test_one_slash_is_named(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "write s3://bucket/folder" in refused(write, photos, "s3:/bucket/photos")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
