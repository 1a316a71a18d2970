"""Who may write a data set: one process all of it, or several of them different parts.

The lock is a file beside what it guards, so that removing that leaves the lock alone. The system
frees it when its process ends, however it ends.
"""

import errno
import fcntl
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pospre.errors import UserError

WHOLE = "whole"
_LOCK_SECONDS = 3.0  # workers of a run that was just killed need a moment to end


@contextmanager
def locked(path: Path, name: str, busy: str) -> Iterator[None]:
    """Hold the lock file ``path`` for the work called ``name``; ``WHOLE`` keeps everybody out.

    Args:
        path: of the file; it is made here, and removed by the last to leave.
        name: one process at a time does the work of this name.
        busy: what to say after the name of another process, if one is at work.

    Raises:
        UserError: another process is at work.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open_locked(path, name, busy) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        try:
            yield
        finally:
            # Others may hold their parts; whoever waits for the removed file looks for a new one.
            if _try_lock(file, WHOLE):
                path.unlink(missing_ok=True)


def _open_locked(path: Path, name: str, busy: str) -> Any:
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        file = path.open("a+")
        try:
            if not _try_lock(file, name):
                if time.monotonic() > end:
                    file.seek(0)
                    raise UserError(f"{file.read().strip() or 'another process'} {busy}")
            elif _is_there(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()
        time.sleep(0.05)


def _try_lock(file: Any, name: str) -> bool:
    """Lock one byte for each name, all bytes for the whole."""
    length, start = (0, 0) if name == WHOLE else (1, zlib.crc32(name.encode()))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _is_there(file: Any, path: Path) -> bool:
    """Tell whether the file was not removed between opening and locking it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
