"""What C libraries write to the standard error, kept with the file that they speak of."""

import os
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from io import FileIO

_STANDARD_ERROR = 2
_MOST_BYTES = 1 << 12
_PILLOWS_NAME = "tempfile.tif: "  # what it calls every TIFF
_lock = threading.Lock()  # the standard error is the process's, not the thread's


@contextmanager
def captured_stderr() -> Generator[list[str]]:
    """Keep what is written to the standard error inside; yield a list that is filled at the end.

    libtiff and libjpeg write lines that name no file. Each different one is kept once.
    """
    said: list[str] = []
    file = _file(os.getpid())
    with _lock:
        real = os.dup(_STANDARD_ERROR)
        os.dup2(file.fileno(), _STANDARD_ERROR)
        try:
            yield said
        finally:
            os.dup2(real, _STANDARD_ERROR)
            os.close(real)
            said += _taken(file)


def _taken(file: FileIO) -> list[str]:
    if not os.fstat(file.fileno()).st_size:
        return []
    text = os.pread(file.fileno(), _MOST_BYTES, 0).decode("utf-8", "replace")
    file.seek(0)
    file.truncate()
    lines = (line.strip().removeprefix(_PILLOWS_NAME) for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


@lru_cache(1)
def _file(process: int) -> FileIO:
    """Open a file for a process's own use; one that was forked needs another."""
    return tempfile.TemporaryFile(buffering=0)
