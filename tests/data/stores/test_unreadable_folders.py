"""A folder that cannot be read is said: its images were missing without a word, and exit code 0."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.sources.registry import open_source
from pospre.data.opening import open_reader
from pospre.data.stores.reader import DamagedSample
from pospre.errors import UserError
from tests.data.conftest import NUM_IMAGES
from tests.data_prep.reading import run
from tests.refusals import refuses


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``broken(folder, error)``: from then on to list this folder fails."""
    scandir = os.scandir

    def break_it(folder: Path, number: int) -> None:
        def fails(path: Any = ".") -> Any:
            if os.path.basename(path) == folder.name:
                raise OSError(number, os.strerror(number), path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", fails)

    return break_it


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_class_that_cannot_be_listed_is_named(
    photos: Path, tmp_path: Path, broken: Any, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(photos, tmp_path / "photos"))
    assert len(open_reader(root)) == NUM_IMAGES
    broken(root / "bee", number)
    said = f"{root}/bee cannot be read \\({os.strerror(number)}\\)"
    refuses(said, lambda: open_reader(root))
    assert run(root, tmp_path / "shards") == 2
    assert "photos/bee cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "shards").exists()


def test_what_a_file_system_keeps_at_its_root_is_passed_over(
    photos: Path, tmp_path: Path, broken: Any
) -> None:
    root = Path(shutil.copytree(photos, tmp_path / "photos"))
    (root / "lost+found").mkdir()
    broken(root / "lost+found", errno.EACCES)
    assert len(open_reader(root)) == NUM_IMAGES == len(open_source(root).items)


def test_a_link_to_a_class_on_a_disk_that_is_gone_is_named(photos: Path, tmp_path: Path) -> None:
    root, disk = tmp_path / "photos", tmp_path / "disk"
    shutil.copytree(photos, disk)
    root.mkdir()
    for name in ("ant", "bee", "cat"):
        (root / name).symlink_to(disk / name)
    assert len(open_reader(root)) == NUM_IMAGES
    shutil.rmtree(disk / "bee")
    for read in (open_reader, open_source):
        with pytest.raises(UserError, match=r"photos/bee cannot be read \(No such file"):
            read(root)


def too_deep(root: Path, size: int) -> int:
    """Make folders below ``root`` until its path has ``size`` bytes; return the last, open."""
    at = os.open(root, os.O_RDONLY)
    left = size - len(os.fsencode(root))
    while left > 0:
        name = "d" * min(200, left - 1 if left - 1 <= 200 else left - 3)
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at, left = below, left - 1 - len(name)
    return at


def write(name: str, data: bytes, folder: int) -> None:
    with open(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
        file.write(data)


def test_a_folder_at_the_end_of_too_long_a_path_is_named(photos: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(photos, tmp_path / "photos"))
    folder = too_deep(root, 4200)
    write("a.jpg", next(photos.rglob("*.jpg")).read_bytes(), folder)
    os.close(folder)
    refuses(r"cannot be read \(File name too long\).*below 4096", lambda: open_reader(root))
    shutil.rmtree(root / ("d" * 200))


def test_a_file_at_the_end_of_too_long_a_path_is_a_damaged_sample(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(photos, tmp_path / "photos"))
    folder = too_deep(root, 4090)
    write("a long name.jpg", next(photos.rglob("*.jpg")).read_bytes(), folder)
    os.close(folder)
    reader = open_reader(root)
    assert len(reader) == NUM_IMAGES + 1
    with pytest.raises(DamagedSample, match="File name too long"):
        reader.read(NUM_IMAGES)
    assert run(root, tmp_path / "shards") == 0
    printed = capsys.readouterr().out
    assert "a long name.jpg: File name too long" in printed
    shutil.rmtree(root / ("d" * 200))
