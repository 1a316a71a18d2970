"""Temporary folders, removed at the end, or by a later command if their process was killed."""

import errno
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pospre.errors import UserError

_NAME = "pospre-tmp-"
_LOCK = ".lock"
_OLD = 7 * 86_400.0  # seconds after which a file of another machine belongs to a dead process
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder among the system's temporary files.

    A lock on a file beside it tells whether its process is alive: containers and machines may share
    the folder, but not the numbers of processes.

    Raises:
        UserError: it cannot be made, or its disk is full.
    """
    parent = temporary_folder()
    _remove_stale(parent)
    folder = parent / f"{_NAME}{uuid.uuid4().hex}"
    lock = folder.with_name(folder.name + _LOCK)
    with _naming(parent), _hold(lock):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def remove_folder_of_torch() -> None:
    """Remove the temporary folder that torch 2.7 makes as ``torch.distributed.fsdp`` is imported.

    It is for modules on other machines, which pospre has none of; a killed process leaves it.
    torch 2.14 makes none.
    """
    module = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if module is not None and hasattr(module, "_TEMP_DIR"):
        module._TEMP_DIR.cleanup()


def temporary_folder() -> Path:
    """Return the folder of temporary files; ``UserError`` if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UserError(
            f"no folder for temporary files can be written ({error}); set TMPDIR to a folder"
        ) from error


def user_cache() -> Path:
    """Return the folder of this user's caches of pospre; it may not exist yet.

    A user without a home folder, as in containers, has it among the temporary files.

    Raises:
        UserError: another user has taken that place.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # neither HOME nor an entry in /etc/passwd
        return Path(home or Path.home() / ".cache") / "pospre"
    folder = temporary_folder() / f"pospre-{os.getuid()}"
    with _naming(folder.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{folder} belongs to another user; set HOME or POSPRE_CACHE to a folder")
    return folder


def full_disk(folder: Path, error: OSError) -> UserError:
    """Return the message that temporary files in ``folder`` cannot be written."""
    return UserError(
        f"{folder}, the folder of temporary files, cannot be written ({error.strerror or error}); "
        "make room there, or set TMPDIR to another folder, and run the command again"
    )


def cause_of_full_disk(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk that caused another error, if one did."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__
    return error


def boot_id() -> str:
    """Return an id of this boot of this machine; ``OSError`` where the system has none."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn errors of a full disk, and of files in ``folder``, into a message that names it."""
    try:
        yield
    except OSError as error:
        is_there = str(error.filename or "").startswith(f"{folder}{os.sep}{_NAME}")
        if is_there or (error.errno in _FULL and error.filename is None):
            raise full_disk(folder, error) from error
        raise


@contextmanager
def _hold(lock: Path) -> Iterator[IO[str]]:
    """Lock a new file; where the disk has no locks, others keep off it as long as it is young."""
    with lock.open("x", encoding="utf-8") as file:
        with suppress(OSError):
            file.write(boot_id())
            file.flush()
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _remove_stale(folder: Path) -> None:
    """Remove the folders of processes that were killed."""
    for lock in folder.glob(f"{_NAME}*{_LOCK}"):
        with suppress(OSError), lock.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            age = time.time() - lock.stat().st_mtime
            # locks of some network disks are known to one machine only; a young one may not be held
            if age > _OLD or (age > 1.0 and file.read() == boot_id()):
                shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
                lock.unlink()
