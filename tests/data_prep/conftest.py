"""Fixtures of the conversion's tests."""

from pathlib import Path

import pytest

from tests.data_prep.bucket import bucket, endpoint, source  # noqa: F401 (fixtures)
from tests.data_prep.reading import Says
from tests.data_prep.sample_images import encoded, picture, write_files


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve plain JPEGs of one size in the classes ``ant`` and ``bee``."""
    files = {
        f"{name}/{number}.jpg": encoded(picture(number + 10 * (name == "bee")))
        for name in ("bee", "ant")
        for number in range(6)
    }
    return write_files(tmp_path / "photos", files)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Says:
    """Return ``refused(command, *arguments)``: what it says when it ends with exit code 2."""
    return lambda *words, code=2, **options: _run(capsys, code, *words, **options).err


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Says:
    """Return ``printed(command, *arguments)``: what it prints when it succeeds."""
    return lambda *words, **options: _run(capsys, 0, *words, **options).out


def _run(capsys, code, command, *arguments, **options):
    capsys.readouterr()
    assert command(*arguments, **options) == code
    return capsys.readouterr()
