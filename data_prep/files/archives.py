"""Encoded bytes in files, and in tars and zips, which are indexed once and read in place."""

import errno
import os
import posixpath
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from pospre.data.stores.files import is_visible, odd_file
from pospre.errors import UserError

_OPEN_ARCHIVES = 64
# a small zip or a file with holes may have more than the memory; no image or list is this large
_MOST_BYTES = 1 << 31
_TOO_LARGE = f"it has more than {_MOST_BYTES} bytes"
_LONGEST_HEADER = 1 << 20  # bytes of a tar's header for a long name or for attributes
_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
# what tarfile raises beside its own errors, for numbers and maps that make no sense; RecursionError
# for long chains of headers; OSError: EINVAL only
_DAMAGED_TAR = (tarfile.TarError, ValueError, OverflowError, RecursionError, OSError)
# RuntimeError: an unsupported version or compression, or a password is needed; ValueError: also
# for names that are not valid text
DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OverflowError)


class DamagedItem(ValueError):
    """The stored content of one item cannot be used; its neighbours may be good."""


class Location(Protocol):
    """Small and picklable; any process can read it."""

    def read(self) -> bytes:
        """Return the bytes; ``DamagedItem`` if the archive is damaged, ``OSError`` of the disk."""


def read_regular(path: Path) -> bytes:
    """Return a file's bytes; ``DamagedItem`` if it is no regular file, ``OSError`` of the disk."""
    odd = odd_file(path)
    if odd is not None:
        raise DamagedItem(f"not a regular file, but {odd}")
    with suppress(OSError):  # reading will raise the error
        if path.stat().st_size > _MOST_BYTES:
            raise DamagedItem(_TOO_LARGE)
    return path.read_bytes()


@dataclass(frozen=True, slots=True)
class InFile:
    """A whole file."""

    path: str

    def read(self) -> bytes:
        """Return the file's bytes."""
        return read_regular(Path(self.path))


@dataclass(frozen=True, slots=True)
class InTar:
    """A range of an uncompressed archive."""

    archive: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the range, without using or changing the position of the open archive."""
        if self.size > _MOST_BYTES:
            raise DamagedItem(_TOO_LARGE)
        file = _open_file(self.archive)  # kept while reading: the cache may drop it
        data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) < self.size:
            raise DamagedItem(f"{self.archive} is truncated")
        return data


@dataclass(frozen=True, slots=True)
class InZip:
    """A member of a zip."""

    archive: str
    member: str

    def read(self) -> bytes:
        """Return the member's bytes, checked by its checksum."""
        try:
            # a ZipFile moves its handle's position, which forked processes would share
            archive = _open_zip(self.archive, os.getpid())
            size = archive.getinfo(self.member).file_size  # never unpacked beyond this
            if size <= _MOST_BYTES:
                return archive.read(self.member)
        except DAMAGED_ZIP as error:
            raise DamagedItem(f"in {self.archive}: {error}") from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # from seeking to a damaged offset
                raise
            raise DamagedItem(f"in {self.archive}: it is outside the file") from error
        raise DamagedItem(
            f"in {self.archive}: it unpacks to {size} bytes; the limit is {_MOST_BYTES}"
        )


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing file, named by a list or a link."""

    def read(self) -> bytes:
        """Raise DamagedItem."""
        raise DamagedItem("it is listed, but missing")


@lru_cache(_OPEN_ARCHIVES)
def _open_file(path: str) -> BinaryIO:
    return open(path, "rb", buffering=0)


@lru_cache(_OPEN_ARCHIVES)
def _open_zip(path: str, process: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


_BLOCK = 512
_AT_ONCE = 1 << 20  # a multiple of blocks
_MOST_LINKS = 40  # from one to the next, as in Linux


class _Member(tarfile.TarInfo):
    """A member whose header is checked before tarfile reads what it announces."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header; ``ReadError`` if it announces a name that no file can have."""
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in _HEADERS and member.size > _LONGEST_HEADER):
            raise tarfile.ReadError(f"{member.name} has a header of {member.size} bytes")
        return member


_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a folder or an archive."""

    name: str  # with forward slashes, relative to the folder or archive
    size: int  # bytes
    stamp: str  # changes with the content, as far as known without reading it
    location: Location


def tar_entries(path: Path, inner: InTar | None = None, limit: int | None = None) -> list[Entry]:
    """Return the visible files of a tar that is not compressed, or of the tar ``inner`` in it.

    A link is the file that it names, or ``Missing``. Of several files of one name the last counts.
    ``limit`` is the number of files after which to stop. ``UserError`` if it is compressed,
    truncated or not a tar.
    """
    named = path if inner is None else f"a tar inside {path}"
    start = inner.offset if inner else 0
    end = start + inner.size if inner else path.stat().st_size
    files: dict[str, Entry] = {}  # also hidden ones, which links may name
    links: dict[str, str] = {}
    visible = []
    with path.open("rb", buffering=0) as file:
        _refuse_compressed(path, os.pread(file.fileno(), 8, start))
        for member in _members(file, named, start, end):
            name = member.name.removeprefix("./")
            if member.islnk() or member.issym():
                links[name] = _linked(name, member)
            elif member.isreg() and not member.issparse():
                stamp = f"{member.mtime:g}@{member.offset_data}"
                location = InTar(str(path), member.offset_data, member.size)
                files[name] = Entry(name, member.size, stamp, location)
            else:
                continue
            visible += [name] * is_visible(name)
            if len(visible) == limit:
                break
    return [_behind(name, files, links) for name in visible]


def _members(file: BinaryIO, named: Path | str, start: int, end: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar, then those of tars joined behind it (``cat a.tar b.tar``)."""
    at: int | None = start
    while at is not None:
        last = "at its beginning" if at == start else f"at byte {at}, where no further tar begins"
        file.seek(at)
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as archive:
                for member in archive:
                    is_whole = 0 <= member.size <= end - member.offset_data
                    if not is_whole and not member.issparse():  # not used: its size is unpacked
                        raise _damaged(named, f"{member.name} is cut off")
                    last = f"after {member.name}"
                    yield member
                mark = archive.offset
        except UserError:
            raise
        except _DAMAGED_TAR as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise _damaged(named, str(error)) from error
        # tarfile takes a cut between two members, or a damaged member, for the end, which is zeros
        if mark + _BLOCK > end or any(os.pread(file.fileno(), _BLOCK, mark)):
            raise _damaged(named, f"it ends {last}")
        at = _after_zeros(file, mark, end)


def _after_zeros(file: BinaryIO, at: int, end: int) -> int | None:
    """Return the offset of the first block from ``at`` that is not all zeros; None: all are."""
    while at < end:
        data = os.pread(file.fileno(), min(_AT_ONCE, end - at), at)
        zeros = len(data) - len(data.lstrip(b"\0"))
        if zeros < len(data):
            return at + zeros // _BLOCK * _BLOCK
        at += len(data) or _AT_ONCE  # none: the file became shorter
    return None


def _linked(name: str, member: tarfile.TarInfo) -> str:
    """Return the name that a link leads to: hard links name members, others are relative."""
    folder = posixpath.dirname(name) if member.issym() else ""
    return posixpath.normpath(posixpath.join(folder, member.linkname))


def _behind(name: str, files: dict[str, Entry], links: dict[str, str]) -> Entry:
    """Return the entry of a file or link."""
    target = name
    for _ in range(_MOST_LINKS):
        if target not in links:
            break
        target = links[target]
    entry = files.get(target)
    return Entry(name, 0, "missing", Missing()) if entry is None else replace(entry, name=name)


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


def _refuse_compressed(path: Path, start: bytes) -> None:
    if start.startswith(_COMPRESSED):
        raise UserError(
            f"{path} is compressed, so its files cannot be read in place; unpack it (tar -xf) and "
            "give the folder."
        )


def _damaged(named: Path | str, what: str) -> UserError:
    return UserError(f"{named} is damaged or not a tar: {what}; copy or download it again.")
