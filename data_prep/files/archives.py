"""The index of a tar or zip, built once, for reading its files in place."""

import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from data_prep.files.locations import DAMAGED_ZIP, InTar, InZip, Location
from pospre.errors import UserError

_BLOCK = 512
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a folder or an archive.

    Attributes:
        name: with forward slashes, relative to the folder or archive.
        size: bytes.
        stamp: changes with the content, as far as known without reading it.
        location: of the bytes.
    """

    name: str
    size: int
    stamp: str
    location: Location


Advance = Callable[[int], object]
"""Called with the number of bytes scanned."""


@contextmanager
def index_progress(paths: list[Path]) -> Iterator[Advance]:
    """Show a progress bar over the bytes of archives that are indexed inside."""
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True, desc="index", disable=None) as bar:
        yield bar.update


def tar_entries(
    path: Path, advance: Advance = int, inner: InTar | None = None, limit: int | None = None
) -> list[Entry]:
    """Return the visible files of a tar that is not compressed.

    Args:
        path: the archive.
        advance: called with the number of bytes read so far (``int``: ignores it).
        inner: location of the tar within this archive, if it is nested.
        limit: number of files after which to stop.

    Raises:
        UserError: it is compressed, truncated or not a tar.
    """
    named = path if inner is None else f"a tar inside {path}"
    start = inner.offset if inner else 0
    end = start + inner.size if inner else path.stat().st_size
    entries: list[Entry] = []
    with path.open("rb", buffering=0) as file:
        _refuse_compressed(path, os.pread(file.fileno(), 8, start))
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                at = start
                for member in archive:
                    stop = member.offset_data + member.size
                    if stop > end:
                        raise _damaged(named, f"{member.name} is cut off")
                    advance(stop - at)
                    at = stop
                    entries += _visible_file(path, member)
                    if len(entries) == limit:
                        return entries
                mark = archive.offset
        except tarfile.TarError as error:
            raise _damaged(named, str(error)) from error
        # tarfile takes a cut between two members, or a damaged member, for the end, which is zeros
        block = os.pread(file.fileno(), _BLOCK, mark)
    if mark + _BLOCK > end or any(block):
        last = f"after {entries[-1].name}" if entries else "at its beginning"
        raise _damaged(named, f"it ends {last}")
    return entries


def zip_entries(path: Path) -> list[Entry]:
    """Return the visible files of a zip; raise UserError if it is damaged or not a zip."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
    except DAMAGED_ZIP as error:
        raise UserError(f"{path} is not a zip ({error}); copy or download it again.") from error
    return [
        Entry(
            member.filename,
            member.file_size,
            f"{member.CRC}@{member.header_offset}",
            InZip(str(path), member.filename),
        )
        for member in members
        if is_visible(member.filename)
    ]


def unpack(file: BinaryIO, named: Path | str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Return chosen files of a tar, compressed or not, by their names without folders.

    Raises:
        UserError: it is damaged or not a tar.
    """
    files = {}
    try:
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                content = archive.extractfile(member) if member.isreg() and wanted(name) else None
                if content is not None:
                    files[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise _damaged(named, str(error)) from error
    return files


def is_visible(name: str) -> bool:
    """Return whether a path is neither hidden nor a metadata file that macOS puts into zips."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _visible_file(path: Path, member: tarfile.TarInfo) -> list[Entry]:
    """Return the entry of a member; empty if it is not a regular file, or hidden."""
    name = member.name.removeprefix("./")
    if not member.isreg() or member.issparse() or not is_visible(name):
        return []
    location = InTar(str(path), member.offset_data, member.size)
    return [Entry(name, member.size, f"{member.mtime:g}@{member.offset_data}", location)]


def _refuse_compressed(path: Path, start: bytes) -> None:
    if start.startswith(_COMPRESSED):
        raise UserError(
            f"{path} is compressed, so its files cannot be read in place; unpack it (tar -xf) and "
            "give the folder."
        )


def _damaged(named: Path | str, what: str) -> UserError:
    return UserError(f"{named} is damaged or not a tar: {what}; copy or download it again.")
