"""Locations of encoded bytes: a file, or a member of a tar or zip that is read in place."""

import errno
import os
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Protocol

from pospre.data.stores.files import odd_file

_OPEN_ARCHIVES = 64
# a small zip may unpack to more than the memory; no image or list is this large
_MOST_UNPACKED = 1 << 31
# NotImplementedError: an unsupported version or compression; RuntimeError: a password is needed
DAMAGED_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    NotImplementedError,
    ValueError,  # also for names that are not valid text
    OverflowError,
)


class DamagedItem(ValueError):
    """The stored content of one item cannot be used; its neighbours may be good."""


class Location(Protocol):
    """Small and picklable; any process can read it."""

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            OSError: it is missing, or the disk or network fails.
            DamagedItem: the archive is damaged here.
        """


def read_regular(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it is missing, or the disk or network fails.
        DamagedItem: it is not a regular file.
    """
    odd = odd_file(path)
    if odd is not None:
        raise DamagedItem(f"not a regular file, but {odd}")
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
            if size <= _MOST_UNPACKED:
                return archive.read(self.member)
        except DAMAGED_ZIP as error:
            raise DamagedItem(f"in {self.archive}: {error}") from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # from seeking to a damaged offset
                raise
            raise DamagedItem(f"in {self.archive}: it is outside the file") from error
        raise DamagedItem(
            f"in {self.archive}: it unpacks to {size} bytes; the limit is {_MOST_UNPACKED}"
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
