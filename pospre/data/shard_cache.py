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
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import TextIO

from pospre.data.mds_index import FileEntry
from pospre.errors import UserError

_PART = ".part"
_LOCKS = "locks"
_ROOM = ".room"
_POLL = 0.05  # seconds between two looks at a lock that another process holds


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
            held = os.open(_version_lock(self.path), os.O_RDWR | os.O_CREAT, 0o666)
            weakref.finalize(self, os.close, held)
            fcntl.flock(held, fcntl.LOCK_SH)
            (self.path / _LOCKS).mkdir(parents=True, exist_ok=True)
            with self.lock(_ROOM, _no_matter):
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
            while not _try_lock(file):
                wait()
                time.sleep(_POLL)
            yield

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
                with self.lock(_ROOM, _no_matter):
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
        """Have no process evict a shard until it is let go, or this process ends."""
        if self.limit is not None and name not in self._kept:
            kept = open(self.path / _LOCKS / f"{name}.use", "a")  # noqa: SIM115
            fcntl.flock(kept, fcntl.LOCK_SH)  # for as long as somebody evicts it
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


def _no_matter() -> None:
    """Wait for what lasts milliseconds."""


def _version_lock(version: Path) -> Path:
    return version.with_name(f"{version.name}.lock")


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
