"""The local folder of downloaded shards: shared by threads, ranks and runs of one machine.

Nothing but files and ``flock``: the kernel releases a lock when its process dies, however it dies,
and a shard appears by renaming, whole and verified. A data set has the folder

    <cache_dir>/<name>-<hash of the address>/
        v-<hash of index.json and pospre.json>.lock   held, shared, by every reader
        v-<hash …>/          index.json, pospre.json, the shards, *.part, locks/
"""

import errno
import fcntl
import hashlib
import math
import os
import re
import resource
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import TextIO

from pospre.data.stores.mds_index import FileEntry
from pospre.errors import UserError

_PART = ".part"
_LOCKS = "locks"
_ROOM = ".room"
_POLL = 0.05  # seconds between two looks at a lock that another process holds
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
        home = root / f"{plain[-60:]}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"
        self.path = home / f"v-{digest.hexdigest()[:16]}"
        self.limit = limit
        self._kept: dict[str, TextIO] = {}
        with _writing(self.path, sum(map(len, contents.values()))):
            home.mkdir(parents=True, exist_ok=True)
            # held as long as this object lives: another run must not take the folder for old
            held = open(_version_lock(self.path), "a+")  # noqa: SIM115
            weakref.finalize(self, held.close)
            _lock(held, fcntl.LOCK_SH, _soon(_version_lock(self.path)))
            (self.path / _LOCKS).mkdir(parents=True, exist_ok=True)
            with self._room():
                for name, content in contents.items():
                    self.file(name + _PART).write_bytes(content)
                    self.publish(name)
        self._remove_parts()
        _remove_old(home, self.path)

    def file(self, name: str) -> Path:
        """Return where a shard lies, or will lie."""
        return self.path / name

    def holds(self, entry: FileEntry) -> bool:
        """Tell whether a shard lies here with its full size."""
        try:
            return self.file(entry.name).stat().st_size == entry.size
        except OSError:
            return False

    def touch(self, name: str) -> None:
        """Note that a shard was used just now."""
        with suppress(OSError):  # evicted by another process, or not ours
            os.utime(self.file(name))

    @contextmanager
    def lock(self, name: str, wait: Callable[[], None]) -> Iterator[None]:
        """Hold a shard's lock; call ``wait`` every now and then (it may raise) until it is free."""
        with open(self.path / _LOCKS / name, "a") as file:
            _lock(file, fcntl.LOCK_EX, wait)
            yield

    def _room(self) -> AbstractContextManager[None]:
        return self.lock(_ROOM, _soon(self.path / _LOCKS / _ROOM))

    @contextmanager
    def incoming(
        self, name: str, size: int, needs: Callable[[], dict[str, float]], *, urgent: bool
    ) -> Iterator[BufferedRandom | None]:
        """Open the file into which a shard is to be downloaded; if not published, it goes again.

        Args:
            name: the shard, whose lock is held.
            size: bytes to set aside: a full disk shows before the download, not in its midst.
            needs: tells when shards will be needed, those of no number perhaps never: the latest
                are evicted first, and among equals the least recently used; negative: never.
            urgent: evict even what is needed sooner, but nothing that a process keeps, and rather
                exceed the limit than wait.

        Gives None where there is no room.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        path = self.file(name + _PART)
        with _writing(path, size):
            try:
                with self._room():
                    has_room = self._make_room(name, size, needs(), urgent)
                    if has_room:
                        with open(path, "wb") as file:
                            if hasattr(os, "posix_fallocate"):  # not on macOS
                                os.posix_fallocate(file.fileno(), 0, size)
                if not has_room:
                    yield None
                    return
                with open(path, "r+b") as file:
                    yield file
            finally:
                path.unlink(missing_ok=True)

    def keep(self, name: str) -> None:
        """Have no process evict a shard until it is let go, or this process ends.

        Raises:
            UserError: no more files can be opened, or another process hangs while it evicts it.
        """
        if self.limit is None or name in self._kept:
            return
        if not self._kept:
            _allow_many_files()
        path = self.path / _LOCKS / f"{name}.use"
        try:
            kept = open(path, "a+")  # noqa: SIM115 (NFS shares what can be read)
        except OSError as error:
            raise UserError(
                f"{path} cannot be opened ({error.strerror or error}). Each of the "
                f"{len(self._kept)} shards in use takes an open file: raise ulimit -n, set a "
                "smaller data.window, or a data.cache_limit that the whole data set fits into."
            ) from error
        try:
            _lock(kept, fcntl.LOCK_SH, _soon(path))
        except BaseException:
            kept.close()
            raise
        self._kept[name] = kept

    def let_go(self, name: str) -> None:
        """End what ``keep`` began."""
        if name in self._kept:
            self._kept.pop(name).close()

    def let_all_go(self) -> None:
        """End all that ``keep`` began."""
        for name in list(self._kept):
            self.let_go(name)

    def publish(self, name: str) -> None:
        """Let a complete file appear under its name."""
        os.replace(self.file(name + _PART), self.file(name))

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
                    if need > own or need == math.inf:
                        shards.append((-need, status.st_mtime, found.name, status.st_size))
        for _, _, other, freed in sorted(shards):
            if used <= self.limit:
                break
            if not other.endswith(_PART):
                with open(self.path / _LOCKS / f"{other}.use", "a") as use:
                    if _try_lock(use):
                        self.file(other).unlink(missing_ok=True)
                        used -= freed
        return urgent or used <= self.limit

    def _remove_parts(self) -> None:
        """Remove what killed processes left of their downloads."""
        for part in self.path.glob(f"*{_PART}"):
            with open(self.path / _LOCKS / part.name.removesuffix(_PART), "a") as file:
                if _try_lock(file):
                    part.unlink(missing_ok=True)


def _soon(path: Path) -> Callable[[], None]:
    """Return how to wait for a lock that is held for milliseconds, or while a version is removed.

    Its holder may have been stopped (Ctrl-Z), or hang on a network disk.
    """
    end = time.monotonic() + _STUCK

    def wait() -> None:
        if time.monotonic() > end:
            raise UserError(
                f"another process has held {path} for {_STUCK:.0f} s, so it is stopped or hangs; "
                f"end it (`fuser {path}` tells its number), or set data.cache_dir to another "
                "folder."
            )

    return wait


def _allow_many_files() -> None:
    """Raise the soft limit of open files as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if 0 <= soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _version_lock(version: Path) -> Path:
    return version.with_name(f"{version.name}.lock")


def _lock(file: TextIO, kind: int, wait: Callable[[], None]) -> None:
    while not _try_lock(file, kind):
        wait()
        time.sleep(_POLL)


def _try_lock(file: TextIO, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_old(home: Path, current: Path) -> None:
    """Remove the versions of a data set that were replaced and that nobody reads any more."""
    for version in home.glob("v-*"):
        if version == current or not version.is_dir():
            continue
        with open(_version_lock(version), "a") as file:
            if _try_lock(file):
                shutil.rmtree(version, ignore_errors=True)


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
        folder = next(folder for folder in path.parents if folder.exists())
        raise UserError(
            f"the disk of {folder} is full: {path.name} needs {size} bytes, and "
            f"{shutil.disk_usage(folder).free} are free. Make room, or set data.cache_limit, or "
            "data.cache_dir on another disk."
        ) from error
