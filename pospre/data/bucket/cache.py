"""The local folder of downloaded shards: shared by threads, ranks and runs of one machine.

A shard appears by renaming, whole and verified. All locks are the kernel's, which lets them go when
their process dies, however it dies. A data set has the folder

    <cache_dir>/<name>-<hash of the address>/
        lock                 held briefly: to make room, to rename a shard, to start a run
        v-<hash of index.json and pospre.json>.lock   held, shared, by every reader
        v-<hash …>/          index.json, pospre.json, the shards, *.part, locks/

A process that downloads a shard holds its lock in ``locks/``. A process that reads shards that may
be evicted holds the shards themselves, shared.
"""

import errno
import fcntl
import hashlib
import math
import os
import re
import resource
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from filelock import FileLock, Timeout

from pospre.atomic_file import nearest_existing
from pospre.data.bucket.checks import difference
from pospre.data.stores.mds_index import FileEntry
from pospre.errors import UserError

_PART = ".part"
_LOCKS = "locks"
_STUCK = 60.0  # seconds after which a lock for milliseconds is held by a process that hangs
_MANY_FILES = 1 << 16


def cache_root(cache_dir: str | Path | None) -> Path:
    """Return the folder under which data sets are kept."""
    default = os.environ.get("POSPRE_CACHE") or "~/.cache/pospre"
    return Path(cache_dir or default).expanduser().absolute()


class ShardCache:
    """The folder of one version of a remote data set.

    Args:
        root: folder under which data sets are kept.
        address: of the data set.
        contents: its small files, by name; they tell versions apart.
        limit: bytes that the shards may take; None for no limit.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(
        self, root: Path, address: str, contents: dict[str, bytes], limit: int | None
    ) -> None:
        digest = hashlib.sha256()
        for name, content in sorted(contents.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", address.partition("://")[2]).strip("-.")
        self._home = root / f"{plain[-60:]}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"
        self.path = self._home / f"v-{digest.hexdigest()[:16]}"
        self.limit = limit
        with _writing(self.path, sum(map(len, contents.values()))), self._alone():
            (self.path / _LOCKS).mkdir(parents=True, exist_ok=True)
            # held as long as this object lives: another run must not take the folder for old
            held = _lock_of(self.path)
            weakref.finalize(self, held.close)
            fcntl.flock(held, fcntl.LOCK_SH)
            for name, content in contents.items():
                part = self.file(name + _PART)
                part.write_bytes(content)
                _sync(part)
                part.replace(self.file(name))
            self._set_old_aside()
        self._remove_leftovers()

    def file(self, name: str) -> Path:
        """Return where a shard lies, or will lie."""
        return self.path / name

    def holds(self, entry: FileEntry) -> bool:
        """Tell whether a shard lies here with its full size."""
        try:
            return self.file(entry.name).stat().st_size == entry.size
        except OSError:
            return False

    def open(self, name: str) -> FileIO | None:
        """Return a shard that no process evicts as long as the file is open; None: it is gone.

        Raises:
            UserError: it cannot be opened.
        """
        path = self.file(name)
        try:
            file = FileIO(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"{path} cannot be opened ({error.strerror or error}). Each shard in use takes an "
                "open file where data.cache_limit is set: raise ulimit -n, set a smaller "
                "data.window, or a limit that the whole data set fits into."
            ) from error
        if _try_lock(file, fcntl.LOCK_SH) and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # it is being evicted
        return None

    @contextmanager
    def downloading(self, name: str, patience: float, stop: threading.Event) -> Iterator[bool]:
        """Be the only one on this machine that downloads, or removes, a shard.

        Gives False where another is at it for ``patience`` seconds, or ``stop`` was set.
        """
        lock = FileLock(self.path / _LOCKS / name)
        with suppress(Timeout):
            lock.acquire(timeout=patience, cancel_check=stop.is_set)
        try:
            yield lock.is_locked
        finally:
            lock.release()

    @contextmanager
    def incoming(
        self, name: str, size: int, needs: Callable[[], dict[str, float]], *, urgent: bool
    ) -> Iterator[Path | None]:
        """Give the file to download a shard into; it is removed in the end unless it was published.

        Args:
            name: the shard, which no other process is downloading.
            size: bytes to set aside: a full disk shows before the download, not in its midst.
            needs: returns when each shard will be needed; one that it does not list may never be.
                Those needed last are evicted first, among equals the least recently used.
            urgent: evict even what is needed sooner, but nothing that a process has open, and
                rather exceed the limit than wait. Otherwise None is given where there is no room.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        path = self.file(name + _PART)
        with _writing(path, size):
            try:
                with self._alone():
                    has_room = self._make_room(name, size, needs(), urgent)
                    if has_room:
                        with path.open("wb") as file:
                            if hasattr(os, "posix_fallocate"):  # not on macOS
                                os.posix_fallocate(file.fileno(), 0, size)
                yield path if has_room else None
            finally:
                path.unlink(missing_ok=True)

    def publish(self, name: str) -> None:
        """Let a complete file appear under its name.

        It waits while room is made: the count would miss a file that is renamed meanwhile.
        """
        part = self.file(name + _PART)
        _sync(part)
        with self._alone():
            part.replace(self.file(name))

    def remove_damaged(self, entry: FileEntry, patience: float, stop: threading.Event) -> str:
        """Compare a shard with its hashes; if they differ, remove it and return what is wrong."""
        path = self.file(entry.name)
        with self.downloading(entry.name, patience, stop):
            try:
                problem = difference(path, entry)
            except FileNotFoundError:  # evicted, or found by another rank before
                return ""
            if problem:
                path.unlink(missing_ok=True)
            return problem

    def touch(self, name: str) -> None:
        """Note that a shard was used just now."""
        with suppress(OSError):  # evicted by another process, or not ours
            os.utime(self.file(name))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one who evicts shards or sets old versions aside."""
        path = self._home / "lock"
        try:
            with FileLock(path, timeout=_STUCK):
                yield
        except Timeout as error:  # Ctrl-Z, or a network disk that hangs
            raise UserError(
                f"another process has held {path} for {_STUCK:.0f} s, so it is stopped or hangs; "
                f"end it (`fuser {path}` tells its number), or set data.cache_dir to another "
                "folder."
            ) from error

    def _make_room(self, name: str, size: int, needs: dict[str, float], urgent: bool) -> bool:
        if self.limit is None:
            return True
        used, shards = size, []
        own = -1.0 if urgent else needs.get(name, math.inf)
        for found in os.scandir(self.path):
            if found.is_file() and not found.name.endswith(".json"):
                with suppress(FileNotFoundError):
                    status = found.stat()
                    used += status.st_size
                    need = needs.get(found.name, math.inf)
                    if not found.name.endswith(_PART) and (need > own or need == math.inf):
                        shards.append((-need, status.st_mtime, found.name, status.st_size))
        for _, _, other, freed in sorted(shards):
            if used <= self.limit:
                break
            with suppress(FileNotFoundError), self.file(other).open("r+b", buffering=0) as file:
                if _try_lock(file):
                    self.file(other).unlink()
                    used -= freed
        return urgent or used <= self.limit

    def _set_old_aside(self) -> None:
        """Rename versions that were replaced and that no process reads any more."""
        for version in self._home.glob("v-*"):
            if version != self.path and version.is_dir():
                with _lock_of(version) as file:
                    if _try_lock(file):
                        version.rename(version.with_name(f"old-{os.urandom(8).hex()}"))

    def _remove_leftovers(self) -> None:
        """Remove old versions, and what killed processes left of their downloads."""
        for version in self._home.glob("old-*"):
            shutil.rmtree(version, ignore_errors=True)
        for part in self.path.glob(f"*{_PART}"):
            with self.downloading(part.name.removesuffix(_PART), 0, threading.Event()) as is_mine:
                if is_mine:
                    part.unlink(missing_ok=True)


def allow_many_files() -> None:
    """Raise the soft limit of open files as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if 0 <= soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _lock_of(version: Path) -> FileIO:
    return FileIO(version.with_name(f"{version.name}.lock"), "a+")


def _sync(path: Path) -> None:
    """Have a file on the disk: after a power cut it should not be full of zeros."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _try_lock(file: FileIO, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _writing(path: Path, size: int) -> Iterator[None]:
    """Turn what goes wrong on the local disk into a message."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}); set data.cache_dir or "
                "POSPRE_CACHE to a folder that can."
            ) from error
        folder = nearest_existing(path.parent)
        raise UserError(
            f"the disk of {folder} is full: {path.name} needs {size} bytes, and "
            f"{shutil.disk_usage(folder).free} are free. Make room, or set data.cache_limit, or "
            "data.cache_dir on another disk."
        ) from error
