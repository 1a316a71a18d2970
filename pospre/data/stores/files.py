"""Reading parts of files with plain reads, so that truncated files are errors and not crashes."""

import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from pospre.errors import UserError

_MOST_OPEN = 64  # of the thousand that a process may usually open
_HINTED_SAMPLES = 256  # maximal distance between threads
_ODD_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

# names, in lower case, that these add to folders of pictures: thumbnails, deleted and older files
_ADDED = re.compile(
    r"@eadir|@tmp|#recycle|#snapshot|@sharesnap"  # Synology
    r"|@recycle|@recently-snapshot|@__thumb"  # QNAP
    r"|~snapshot"  # NetApp
    r"|\$recycle\.bin|system volume information|thumbs\.db|desktop\.ini"  # Windows
    r"|__macosx|network trash folder|temporary items"  # macOS
    r"|lost\.dir|.+\.thm"  # Android; cameras: thumbnails of films
    r"|.+\.lrdata|.+\.\w+~"  # Lightroom's previews; editors' backups
    r"|.+\.(?:part|partial|crdownload)"  # browsers: unfinished downloads
)


def odd_file(path: str | Path) -> str | None:
    """Describe a path that must not be opened because that may block; None: it can be opened.

    A path that cannot be accessed is not special: opening it raises an error.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return next((name for is_odd, name in _ODD_KINDS if is_odd(mode)), None)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or ext4's lost+found."""
    return name.startswith(".") or name == "lost+found"


def is_added(name: str) -> bool:
    """Return whether a system, editor or camera has added a file or folder to the user's."""
    return _ADDED.fullmatch(name.lower()) is not None


def is_visible(path: str) -> bool:
    """Return whether no part of a path is hidden or added."""
    return not any(is_hidden(name) or is_added(name) for name in path.split("/"))


def names_in(folder: str | Path) -> list[str]:
    """Return the names in a folder, sorted; raise ``UserError`` if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        refuse_unlisted(error)


def refuse_unlisted(error: OSError) -> NoReturn:
    """Raise a ``UserError`` for a folder (or possible folder) that cannot be read.

    For use as ``onerror`` of ``os.walk``, which otherwise skips such a folder silently.
    """
    raise UserError(
        f"{error.filename} cannot be read ({error.strerror}), so its content would be missing. "
        "Make it readable (permissions, mount, a path below 4096 bytes), or move it away."
    ) from error


def read_bytes(file: Path | FileIO, offset: int = 0, size: int | None = None) -> Tensor:
    """Read a part of a file (default: all) as uint8 (size,); ``UserError`` if it is shorter."""
    try:
        if not isinstance(file, Path):
            return _read_part(file, offset, size)
        with FileIO(file) as opened:
            return _read_part(opened, offset, size)
    except OSError as error:
        name = file if isinstance(file, Path) else file.name
        raise UserError(f"{name} cannot be read: {error.strerror}.") from error


def _read_part(file: FileIO, offset: int, size: int | None) -> Tensor:
    descriptor = file.fileno()
    if size is None:
        size = os.fstat(descriptor).st_size - offset
    data = torch.empty(size, dtype=torch.uint8)
    view, done = data.numpy().data, 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise UserError(
                f"{file.name!s} is truncated: it ends at byte {os.fstat(descriptor).st_size}, but "
                f"bytes up to {offset + size} are needed. Copy or convert it again."
            )
        done += count
    return data


class ByteRange(NamedTuple):
    """The location of a sample's bytes."""

    path: Path
    offset: int
    size: int


class SampleBytes:
    """Reads samples of local files, and tells the operating system which come next.

    The most recent files stay open: opening one costs a network disk a round trip. None is closed
    explicitly: a dropped file closes when its last reader is done, so a descriptor that another
    file reuses meanwhile is never read by mistake.
    """

    def __init__(self, locate: Callable[[int], ByteRange]) -> None:
        """Store ``locate``, which locates a sample; it must be fast and thread-safe."""
        self._locate = locate
        self._coming: Iterator[int] = iter(())
        self._files: dict[Path, FileIO] = {}
        self._lock = threading.Lock()

    def read(self, index: int) -> Tensor:
        """Return a sample's bytes, uint8 (N,); raise UserError if they cannot be read."""
        self._hint(1)
        path, offset, size = self._locate(index)
        try:
            file = self._open(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
        return read_bytes(file, offset, size)

    def expect(self, indices: np.ndarray) -> None:
        """Set the samples that will be read from now on, in order; replaces earlier ones."""
        self._coming = map(int, indices) if hasattr(os, "posix_fadvise") else iter(())  # macOS
        self._hint(_HINTED_SAMPLES)

    def close(self) -> None:
        """Stop hinting, and drop the files."""
        self._coming = iter(())
        with self._lock:
            self._files.clear()

    def _hint(self, count: int) -> None:
        for coming in itertools.islice(self._coming, count):
            path, offset, size = self._locate(coming)
            with suppress(OSError):  # reading will raise the error
                os.posix_fadvise(self._open(path).fileno(), offset, size, os.POSIX_FADV_WILLNEED)

    def _open(self, path: Path) -> FileIO:
        file = self._files.get(path)
        if file is None:
            file = FileIO(path)
            with self._lock:
                if len(self._files) >= _MOST_OPEN:
                    self._files.pop(next(iter(self._files)), None)
                self._files[path] = file
        return file
