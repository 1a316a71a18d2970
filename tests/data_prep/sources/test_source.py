import errno
import os
from pathlib import Path

import pytest

from data_prep.files.archives import DamagedItem
from data_prep.sources.registry import open_source
from data_prep.sources.source import Item, Source, read_item
from pospre.errors import UserError

ITEM = Item("a.jpg", -1, 0, "")


def read(root: Path) -> bytes:
    return read_item(Source(root, (ITEM,)), ITEM)


def why_not_read(root: Path) -> str:
    with pytest.raises(DamagedItem) as caught:
        read(root)
    return str(caught.value)


def fail_to_read(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def read_bytes(path: Path) -> bytes:
        raise error

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def test_the_bytes_of_a_file(tmp_path: Path) -> None:
    assert why_not_read(tmp_path) == "No such file or directory"
    (tmp_path / "a.jpg").write_bytes(b"")
    assert why_not_read(tmp_path) == "the file is empty"
    (tmp_path / "a.jpg").write_bytes(b"some")
    assert read(tmp_path) == b"some"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        *((OSError(n, os.strerror(n)), os.strerror(n)) for n in (errno.EACCES, errno.ELOOP)),
        (DamagedItem("its checksum is wrong"), "its checksum is wrong"),
        (MemoryError(), "the file is larger than the memory"),
    ],
)
def test_what_cannot_be_read_gives_a_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_read(monkeypatch, error)
    assert why_not_read(Path("here")) == reason


def test_a_file_that_is_gone_since_it_was_listed_stops(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"some")
    (tmp_path / "b.jpg").symlink_to("nowhere.jpg")
    source = open_source(tmp_path)
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(UserError, match=r"a\.jpg existed when .* was listed, but is gone: No su"):
        read_item(source, source.items[0])
    # what was never read, such as a link to nowhere, is left out
    with pytest.raises(DamagedItem, match="No such file or directory"):
        read_item(source, source.items[1])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_failing_disk_is_no_corrupt_image(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fail_to_read(monkeypatch, OSError(number, os.strerror(number)))
    with pytest.raises(UserError, match=r"here/a\.jpg cannot be read: .*Nothing was written"):
        read(Path("here"))
