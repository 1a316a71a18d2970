"""The local folder of downloaded shards, shared by threads, ranks and runs of one machine.

A shard appears by renaming, complete and verified. All locks are the kernel's, which releases them
when their process dies in any way. A data set has the folder

    <cache_dir>/<name>-<hash of the address>/
        lock                 held briefly: to make room, to rename a shard, to start a run
        v-<hash of index.json, pospre.json and tags.json>.lock   held, shared, by every reader
        v-<hash …>/          index.json, pospre.json, tags.json (ETags of shards without recorded
                             hashes, whose content may change otherwise), the shards, *.part, locks/

A process that downloads a shard holds its lock in ``locks/``. A process that reads shards that may
be evicted holds shared locks on these shards.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import FileIO
from pathlib import Path

from filelock import FileLock, Timeout

from pospre.atomic_file import nearest_existing, sync, try_lock
from pospre.data.bucket.checks import difference
from pospre.data.stores.mds_index import FileEntry
from pospre.errors import UserError
from pospre.scratch import user_cache

_PART = ".part"
_LOCKS = "locks"
_STUCK = 60.0  # seconds after which the holder of a short lock must be hanging
_MANY_FILES = 1 << 16


def cache_root(cache_dir: str | Path | None) -> Path:
    """Return the folder for the caches of all data sets."""
    folder = Path(cache_dir or os.environ.get("POSPRE_CACHE") or user_cache())
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise UserError(
            f"data.cache_dir {folder}: the home folder is not known ({error}); give a full path, "
            "or set HOME"
        ) from error


class ShardCache:
    """The folder of one version of a remote data set; ``UserError`` if it cannot be written.

    Its small files, ``contents`` by name, identify the version. ``limit`` is the maximal number of
    bytes of its shards; None: no limit.
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
            # held during this object's lifetime: another run must not consider the folder old
            held = _lock_of(self.path)
            weakref.finalize(self, held.close)
            fcntl.flock(held, fcntl.LOCK_SH)
            for name, content in contents.items():
                part = self.file(name + _PART)
                part.write_bytes(content)
                sync(part)
                part.replace(self.file(name))
            self._set_old_aside()
        self._remove_leftovers()

    def file(self, name: str) -> Path:
        """Return the path of a shard, which may not exist yet."""
        return self.path / name

    def holds(self, entry: FileEntry) -> bool:
        """Return whether a shard is here with its full size."""
        try:
            return self.file(entry.flat_name).stat().st_size == entry.size
        except OSError:
            return False

    def open(self, name: str) -> FileIO | None:
        """Return a shard that is not evicted while the file is open; None: it was evicted."""
        path = self.file(name)
        try:
            file = FileIO(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(
                f"{path} cannot be opened ({error.strerror or error}). With data.cache_limit, each "
                "shard in use takes an open file: raise ulimit -n, set a smaller data.window, or a "
                "limit that fits the whole data set."
            ) from error
        if try_lock(file, fcntl.LOCK_SH) and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # it is being evicted
        return None

    @contextmanager
    def downloading(self, name: str, patience: float, stop: threading.Event) -> Iterator[bool]:
        """Lock a shard against downloads and removals by other processes of this machine.

        Yields False if another process holds it for ``patience`` seconds, or ``stop`` was set.
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
        """Yield the file to download a shard into; it is removed at the end unless published.

        Args:
            name: the shard, which no other process is downloading.
            size: bytes to reserve, so that a full disk is noticed before the download.
            needs: returns when each shard is needed; shards not listed may never be. Those needed
                last are evicted first, among equals the least recently used.
            urgent: evict even shards that are needed sooner, but none that a process has open, and
                exceed the limit rather than wait. Otherwise None is yielded if there is no room.
        """
        path = self.file(name + _PART)
        with _writing(path, size):
            try:
                with self._counting():
                    has_room = self._make_room(name, size, needs(), urgent)
                    if has_room:
                        with path.open("wb") as file:
                            if hasattr(os, "posix_fallocate"):  # missing on macOS
                                os.posix_fallocate(file.fileno(), 0, size)
                yield path if has_room else None
            finally:
                path.unlink(missing_ok=True)

    def publish(self, name: str) -> None:
        """Rename a complete file to its final name.

        It waits while another process makes room: the count would miss a file renamed meanwhile.
        """
        part = self.file(name + _PART)
        sync(part)  # after a power cut it could otherwise be full of zeros
        with self._counting():
            part.replace(self.file(name))

    def remove_damaged(self, entry: FileEntry, patience: float, stop: threading.Event) -> str:
        """Verify a shard's hashes; if they differ, remove it and return what is wrong."""
        path = self.file(entry.flat_name)
        with self.downloading(entry.flat_name, patience, stop):
            try:
                problem = difference(path, entry)
            except FileNotFoundError:  # evicted, or already removed by another rank
                return ""
            if problem:
                path.unlink(missing_ok=True)
            return problem

    def touch(self, name: str) -> None:
        """Mark a shard as just used."""
        with suppress(OSError):  # evicted by another process, or not ours
            os.utime(self.file(name))

    def _counting(self) -> AbstractContextManager[None]:
        """Lock the count of bytes against other processes, if there is a limit."""
        return nullcontext() if self.limit is None else self._alone()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock eviction and the removal of old versions against other processes."""
        path = self._home / "lock"
        try:
            with FileLock(path, timeout=_STUCK):
                yield
        except Timeout as error:  # Ctrl-Z, or a network disk that hangs
            raise UserError(
                f"another process has held {path} for {_STUCK:.0f} s, so it is stopped or hangs; "
                f"end it (`fuser {path}` shows its id), or set data.cache_dir to another folder."
            ) from error

    def _make_room(self, name: str, size: int, needs: dict[str, float], urgent: bool) -> bool:
        if self.limit is None:
            return True
        used, shards = size, []
        own = -1.0 if urgent else needs.get(name, math.inf)
        for entry in os.scandir(self.path):
            if entry.is_file() and not entry.name.endswith(".json"):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    used += status.st_size
                    need = needs.get(entry.name, math.inf)
                    if not entry.name.endswith(_PART) and (need > own or need == math.inf):
                        shards.append((-need, status.st_mtime, entry.name, status.st_size))
        for _, _, other, freed in sorted(shards):
            if used <= self.limit:
                break
            with suppress(FileNotFoundError), self.file(other).open("r+b", buffering=0) as file:
                if try_lock(file):
                    self.file(other).unlink()
                    used -= freed
        return urgent or used <= self.limit

    def _set_old_aside(self) -> None:
        """Rename old versions that no process reads any more."""
        for version in self._home.glob("v-*"):
            if version != self.path and version.is_dir():
                with _lock_of(version) as file:
                    if try_lock(file):
                        version.rename(version.with_name(f"old-{os.urandom(8).hex()}"))

    def _remove_leftovers(self) -> None:
        """Remove old versions, and partial downloads of killed processes."""
        for version in self._home.glob("old-*"):
            shutil.rmtree(version, ignore_errors=True)
        for part in self.path.glob(f"*{_PART}"):
            with self.downloading(part.name.removesuffix(_PART), 0, threading.Event()) as is_mine:
                if is_mine:
                    part.unlink(missing_ok=True)


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if 0 <= soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _lock_of(version: Path) -> FileIO:
    return FileIO(version.with_name(f"{version.name}.lock"), "a+")


@contextmanager
def _writing(path: Path, size: int) -> Iterator[None]:
    """Turn errors of the local disk into ``UserError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}); set data.cache_dir or "
                "POSPRE_CACHE to a writable folder."
            ) from error
        folder = nearest_existing(path.parent)
        raise UserError(
            f"the disk of {folder} is full: {path.name} needs {size} bytes, but only "
            f"{shutil.disk_usage(folder).free} are free. Make room, or set data.cache_limit, or "
            "data.cache_dir on another disk."
        ) from error
