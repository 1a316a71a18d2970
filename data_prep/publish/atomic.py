"""Atomic writing: under a lock, into a partial folder, which is renamed when complete.

One process writes all of a data set, or several write different parts. The lock is a file beside
the data set, so it survives the data set's removal. The system releases it when its process ends,
even by a kill.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pospre.atomic_file import sync, try_lock
from pospre.attempts import attempts
from pospre.errors import UserError

_LOCK_SECONDS = 3.0  # workers of a killed run need a moment to end


@contextmanager
def locked(path: Path, guarded: Path, *, shared: bool) -> Iterator[None]:
    """Hold the lock file ``path``, alone or ``shared`` with others that write parts.

    The last holder removes the file. ``UserError`` if another process is writing ``guarded``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open_locked(path, guarded, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        try:
            yield
        finally:
            # others may hold their parts. A process that waits for the removed file opens a new one
            if try_lock(file, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)


def _open_locked(path: Path, guarded: Path, kind: int) -> Any:
    end, other = time.monotonic() + _LOCK_SECONDS, ""
    for _ in attempts(lambda: end, 0.05, 0.05):
        with ExitStack() as stack:
            file = stack.enter_context(path.open("a+"))
            if not try_lock(file, kind):
                file.seek(0)
                other = file.read().strip() or other
            elif _is_there(file, path):
                stack.pop_all()
                return file
    raise UserError(f"{other or 'another process'} is writing {guarded}; wait for it.")


def _is_there(file: Any, path: Path) -> bool:
    """Return whether the file still exists after locking it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


@contextmanager
def writing(destination: object) -> Iterator[None]:
    """Turn an ``OSError`` inside (disk full, no permission) into a ``UserError``."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""  # it may be elsewhere
        raise UserError(
            f"cannot write {destination}: {error.strerror or error}{where}. Make room or choose "
            "another destination, then run the same command again."
        ) from error


def replace_folder(complete: Path, destination: Path) -> None:
    """Move a complete folder to the destination; an old one is moved aside, then removed.

    If that fails, the old one is put back. No other process may write the destination meanwhile.
    """
    for path in (*complete.rglob("*"), complete):
        sync(path)
    old = destination.with_name(f"{destination.name}.partial-old")
    shutil.rmtree(old, ignore_errors=True)  # from a killed run
    was_there = destination.exists()
    if was_there:
        destination.rename(old)
    try:
        complete.rename(destination)
    except BaseException:
        if was_there and not destination.exists():
            old.rename(destination)
        raise
    sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def replace_pair(first: tuple[Path, Path], second: tuple[Path, Path]) -> None:
    """Rename two files (from, to) that belong together, after flushing them to disk.

    The old second file is removed first, so that a kill in between leaves no mixed pair.
    """
    for source, _ in (first, second):
        sync(source)
    second[1].unlink(missing_ok=True)
    for source, destination in (first, second):
        source.replace(destination)
    sync(second[1].parent)
