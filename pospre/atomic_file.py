"""Files that get their names only when complete, even after a kill or a power cut."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

PARTIAL = ".partial"
"""Suffix of a file that is being written, or whose writer was killed."""


@contextmanager
def atomic_open(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its name when complete; if writing fails, it is removed.

    If several processes write it at once, the last one wins. To survive a power cut, call ``flush``
    at the end.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def try_lock(file: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file; return False if another process holds it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def nearest_existing(path: Path) -> Path:
    """Return ``path``, or its nearest existing parent folder."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def flush(file: BinaryIO) -> None:
    """Wait until the written data are on the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Write a file that gets its name only when complete, even after a power cut.

    Raises:
        OSError: the disk is full or not writable; an earlier file of this name is unchanged.
    """
    with atomic_open(path) as file:
        file.write(content)
        flush(file)
    sync(path.parent)  # so that the new name also survives a power cut


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
