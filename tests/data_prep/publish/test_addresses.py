"""Local destinations that look like addresses, and an address with one slash."""

from pathlib import Path

import pytest

from tests.data_prep.reading import read_samples
from tests.data_prep.reading import run as write


@pytest.mark.parametrize("name", ["v2:photos", "dbfs:/mnt/photos", "gs:photos"])
def test_a_local_name_with_a_colon_is_a_local_name(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write(photos, name) == 0
    assert len(read_samples(tmp_path / name)) == 12
