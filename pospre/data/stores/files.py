"""Reading parts of files: plain reads, so that a file cut short is an error and not a crash."""

import mmap
import os
import stat
import threading
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from pospre.errors import UserError

_MOST_OPEN = 64  # of the thousand that a process may usually have
_ODD_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class OpenFiles:
    """Keeps the files open that were read last: to open one costs a network disk a round trip.

    Nothing is closed by hand. A file that is forgotten here closes when its last reader is done, so
    a number that another file got meanwhile is never read by mistake.
    """

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> FileIO:
        """Return a file, opened to read; raises OSError."""
        file = self._files.get(path)
        if file is None:
            file = FileIO(path)
            with self._lock:
                if len(self._files) >= _MOST_OPEN:
                    self._files.pop(next(iter(self._files)), None)
                self._files[path] = file
        return file

    def forget(self) -> None:
        """Let all files go."""
        with self._lock:
            self._files.clear()


def odd_file(path: str | Path) -> str | None:
    """Say what a path leads to that must not be opened, as that may take for ever; None: nothing.

    What cannot be looked at is for whoever opens it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return next((name for is_odd, name in _ODD_KINDS if is_odd(mode)), None)


def read_bytes(
    path: Path,
    offset: int = 0,
    size: int | None = None,
    *,
    keep: bool = True,
    files: OpenFiles | None = None,
) -> Tensor:
    """Read a part of a file (the whole by default) as uint8 (size,).

    Args:
        path: the file.
        offset: of the first byte.
        size: of the part; by default all that follows.
        keep: otherwise the operating system is told to forget these bytes when they were read.
        files: where the file may be open already, and stays so.

    Raises:
        UserError: the file cannot be read or is shorter than it was.
    """
    try:
        if files is None:
            with FileIO(path) as file:
                return _read_part(file, path, offset, size, keep)
        return _read_part(files.get(path), path, offset, size, keep)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _read_part(file: FileIO, path: Path, offset: int, size: int | None, keep: bool) -> Tensor:
    descriptor = file.fileno()
    if size is None:
        size = os.fstat(descriptor).st_size - offset
    data = torch.empty(size, dtype=torch.uint8)
    view, done = data.numpy().data, 0
    if not keep:  # nor read what lies behind them
        _advise(descriptor, offset, size, "POSIX_FADV_RANDOM")
    while done < size:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise UserError(
                f"{path} is cut off: it ends at byte {os.fstat(descriptor).st_size}, but "
                f"bytes up to {offset + size} are needed. Copy or convert it again."
            )
        done += count
    if not keep:
        _advise(descriptor, offset, size, "POSIX_FADV_DONTNEED")
    return data


def will_read(path: Path, offset: int, size: int, files: OpenFiles) -> None:
    """Tell the operating system that a part of a file will be read soon."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    try:
        os.posix_fadvise(files.get(path).fileno(), offset, size, os.POSIX_FADV_WILLNEED)
    except OSError:
        return  # whoever reads the part will say so


def _advise(descriptor: int, offset: int, size: int, advice: str) -> None:
    """Tell the kernel about a part of a file, where there is a way to."""
    if hasattr(os, "posix_fadvise"):
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE  # parts of pages would be kept
        end = -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fadvise(descriptor, start, end - start, getattr(os, advice))
