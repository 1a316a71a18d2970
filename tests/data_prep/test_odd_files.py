"""Files that are no files: to open them may take for ever."""

import os
import socket
from pathlib import Path

import pytest

from data_prep.sources.registry import open_source
from pospre.data.stores.folder_reader import FolderReader
from pospre.data.stores.reader import DamagedSample
from pospre.errors import UserError
from tests.data_prep.reading import Says, description, read_samples, run
from tests.data_prep.sample_images import encoded, picture, write_files

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two photographs among a FIFO, a socket, a link to a device, and links astray."""
    root = write_files(tmp_path / "photos", {f"a/{n}.jpg": encoded(picture(n)) for n in (1, 2)})
    os.mkfifo(root / "a/fifo.jpg")
    os.mkfifo(root / "a/pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "a/socket.png"))
    (root / "a/device.jpg").symlink_to("/dev/zero")
    (root / "a/astray.jpg").symlink_to(root / "nowhere")
    (root / "a/loop.jpg").symlink_to("loop.jpg")
    return root


def test_they_are_listed_and_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = root.parent / "out"
    assert run(root, target) == 0
    assert len(read_samples(target)) == 2
    reasons = {item["path"]: item["reason"] for item in description(target)["skipped"]}
    for name in ("fifo.jpg", "socket.png", "device.jpg"):
        assert reasons[f"a/{name}"].startswith("not a regular file, but a ")
    assert reasons.keys() >= {"a/astray.jpg", "a/loop.jpg"}
    printed = capsys.readouterr().out
    assert "unreadable: a/fifo.jpg: not a regular file, but a FIFO" in printed
    assert description(target)["ignored_examples"] == ["a/pipe: a FIFO"]
    assert "ignored, for instance: a/pipe: a FIFO" in printed


def test_training_from_the_folder_names_them(root: Path) -> None:
    reader = FolderReader(root)
    assert len(reader) == 7
    for index in range(7):
        name = Path(reader.name(index)).name
        if name in ("1.jpg", "2.jpg"):
            assert len(reader.read(index).encoded)
        else:
            with pytest.raises(DamagedSample, match=name):
                reader.read(index)


@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
def test_archives_that_are_none_are_refused(tmp_path: Path, suffix: str) -> None:
    kind = {".tar": "webdataset", ".parquet": "parquet"}[suffix]
    os.mkfifo(tmp_path / f"odd{suffix}")
    for path in (tmp_path / f"odd{suffix}", tmp_path):
        with pytest.raises(UserError, match=f"odd{suffix} is a FIFO"):
            open_source(path, kind=kind)
    with pytest.raises(UserError, match="has no images"):
        open_source(tmp_path)


def test_pictures_of_other_formats_are_named(tmp_path: Path, printed: Says) -> None:
    heic = b"\0\0\0\x1cftypheic" + bytes(100)
    files = {"a/1.jpg": encoded(picture()), "a/2.heic": heic, "a/3.heic": heic, "a/n\n.txt": b"x"}
    said = printed(run, write_files(tmp_path / "photos", files), tmp_path / "mds")
    assert "  ignored         3\n" in said
    assert "for instance: a/2.heic: HEIC, which Pillow cannot read; make a PNG" in said
    assert "for instance: a/n\\n.txt\n" in said
    (tmp_path / "photos/a/1.jpg").unlink()
    with pytest.raises(UserError, match=r"3 other files, for instance a/2.heic: HEIC, which"):
        FolderReader(tmp_path / "photos")
