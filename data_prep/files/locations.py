"""Where encoded bytes lie: in a file, or inside a tar or zip, read there without unpacking it."""

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
# A zip of some kilobytes may unpack to more than any memory holds; no image or list is as large.
_MOST_UNPACKED = 1 << 31
# NotImplementedError: an odd version or compression; RuntimeError: a password is needed.
DAMAGED_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    NotImplementedError,
    ValueError,  # names that are no text among them
    OverflowError,
)


class DamagedItem(ValueError):
    """What is stored for one item cannot be used; its neighbours can."""


class Location(Protocol):
    """Small and picklable; any process may read it."""

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            OSError: they are absent, or the disk or network fails.
            DamagedItem: the archive is damaged here.
        """


def read_regular(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        OSError: it is absent, or the disk or network fails.
        DamagedItem: it is no regular file.
    """
    odd = odd_file(path)
    if odd is not None:
        raise DamagedItem(f"no regular file, but {odd}")
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
    """A stretch of an archive that is not compressed."""

    archive: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the stretch; the position of the open archive is neither used nor changed."""
        file = _open_file(self.archive)  # held while it is read: the cache may let go of it
        data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) < self.size:
            raise DamagedItem(f"{self.archive} is cut off before its end")
        return data


@dataclass(frozen=True, slots=True)
class InZip:
    """A member of a zip."""

    archive: str
    member: str

    def read(self) -> bytes:
        """Return the member's bytes, checked by its checksum."""
        try:
            # A ZipFile moves its handle's position, which forked processes would share.
            archive = _open_zip(self.archive, os.getpid())
            size = archive.getinfo(self.member).file_size  # it is never unpacked beyond this
            if size <= _MOST_UNPACKED:
                return archive.read(self.member)
        except DAMAGED_ZIP as error:
            raise DamagedItem(f"in {self.archive}: {error}") from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a damaged offset, to which there is no seeking
                raise
            raise DamagedItem(f"in {self.archive}: it lies outside") from error
        raise DamagedItem(
            f"in {self.archive}: it unpacks to {size} bytes, and at most {_MOST_UNPACKED} are read"
        )


@dataclass(frozen=True, slots=True)
class Missing:
    """Nowhere: a list names the file, or a link leads to it, but it is not there."""

    def read(self) -> bytes:
        """Raise DamagedItem."""
        raise DamagedItem("it is listed, but missing")


@lru_cache(_OPEN_ARCHIVES)
def _open_file(path: str) -> BinaryIO:
    return open(path, "rb", buffering=0)


@lru_cache(_OPEN_ARCHIVES)
def _open_zip(path: str, process: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)
