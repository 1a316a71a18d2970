"""How one shard comes into the cache: locked, downloaded, compared with its description, published.

Compressed shards are decompressed on arrival. That, and the hashes that Python lacks (xxhash), is
done by Streaming, which is imported only then: it takes seconds.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from io import BufferedRandom, BufferedReader

import numpy as np

from pospre.data.bucket.cache import ShardCache
from pospre.data.bucket.transfer import Stopped, Transfer
from pospre.data.stores.mds_index import FileEntry, ShardEntry
from pospre.errors import UserError
from pospre.object_store import Bucket


class _LeftToOthers(Exception):
    """Another process is at it, and nobody here waits for it."""


class Supplier:
    """Brings shards from a bucket into a cache.

    Args:
        bucket: the remote data set.
        cache: where the shards go.
        patience: seconds that one shard may take.
    """

    def __init__(self, bucket: Bucket, cache: ShardCache, patience: float) -> None:
        self.bucket = bucket
        self.cache = cache
        self.patience = patience

    def bring(
        self,
        entry: ShardEntry,
        *,
        needs: Callable[[], dict[str, float]],
        urgent: bool,
        stop: threading.Event,
        watch: Callable[[Transfer], None],
    ) -> bool:
        """Make a shard lie in the cache; tell whether it does.

        What is not ``urgent`` is left where another process is at it, or where there is no room.

        Args:
            entry: the shard.
            needs: see ``ShardCache.incoming``.
            urgent: somebody waits for it.
            stop: set when it is no longer wanted.
            watch: is told of every download that starts.

        Raises:
            UserError: it cannot be had.
            Stopped: ``stop`` was set.
        """
        in_time = self._wait_in_time()

        def wait() -> None:
            if stop.is_set():
                raise Stopped
            if not urgent:
                raise _LeftToOthers
            in_time()

        try:
            with self.cache.lock(entry.raw.name, wait):
                if self.cache.holds(entry.raw):
                    return True
                return self._download(entry, needs, urgent, stop, watch)
        except _LeftToOthers:
            return False

    def remove_damaged(self, entry: ShardEntry) -> str:
        """Remove a shard from the cache that is not what came; return in what it differs.

        Raises:
            UserError: another process is at it for too long, or the cache cannot be read.
        """
        path = self.cache.file(entry.raw.name)
        with self.cache.lock(entry.raw.name, self._wait_in_time()):
            try:
                with open(path, "rb") as file:
                    problem = _compare(file, entry.raw)
                if problem:
                    path.unlink()
            except FileNotFoundError:  # evicted, or found by another rank before
                return ""
            except OSError as error:
                raise UserError(f"{path} cannot be read or removed ({error})") from error
        return problem

    def _wait_in_time(self) -> Callable[[], None]:
        """Return how to wait for a lock: until the patience ends."""
        deadline = time.monotonic() + self.patience

        def wait() -> None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process has been downloading it for {self.patience:.0f} s"
                )

        return wait

    def _download(
        self,
        entry: ShardEntry,
        needs: Callable[[], dict[str, float]],
        urgent: bool,
        stop: threading.Event,
        watch: Callable[[Transfer], None],
    ) -> bool:
        name = entry.raw.name
        size = max(entry.raw.size, entry.stored.size)
        for _ in range(2):
            with self.cache.incoming(name, size, needs, urgent=urgent) as file:
                if file is None:
                    return False
                transfer = Transfer(self.bucket, entry.stored.name)
                watch(transfer)
                transfer.run(file, patience=self.patience, stop=stop)
                problem = transfer.damage or _unpack(file, transfer.done, entry)
                if not problem:
                    self.cache.publish(name)
                    return True
        raise UserError(
            f"{transfer.address} is not what the data set's description says: {problem}; it was "
            "downloaded twice"
        )


def _unpack(file: BufferedRandom, size: int, entry: ShardEntry) -> str:
    """Turn what was downloaded into the shard as it is read; return what is wrong with it."""
    file.truncate(size)
    problem = _compare(file, entry.stored)
    if problem:
        return problem
    if entry.packed:
        file.seek(0)
        try:
            content = _decompress(entry.compression, file.read())
        except Exception as error:  # of a kind of the library's own, for each of five libraries
            return f"it cannot be decompressed ({error})"
        file.seek(0)
        file.write(content)
        file.truncate()
        problem = _compare(file, entry.raw)
        if problem:
            return f"decompressed, {problem}"
    file.seek(0)
    words = np.frombuffer(file.read(4 * (entry.num_samples + 2)), np.uint8)
    if entry.offsets(words) is None:
        return "it does not start as index.json says"
    os.fsync(file.fileno())  # after a power cut a file of full size should not be full of zeros
    return ""


def _compare(file: BufferedReader | BufferedRandom, entry: FileEntry) -> str:
    """Return in what a file differs from its description."""
    file.flush()
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        return f"it has {size} bytes instead of {entry.size}"
    for algorithm, expected in entry.hashes.items():
        file.seek(0)
        if _digest(file, algorithm) != expected:
            return f"its {algorithm} is another"
    return ""


def is_own_hash(algorithm: str) -> bool:
    """Tell whether Python itself knows a hash."""
    return algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_")


def _digest(file: BufferedReader | BufferedRandom, algorithm: str) -> str:
    if is_own_hash(algorithm):
        return hashlib.file_digest(file, algorithm).hexdigest()
    from streaming.base.hashing import get_hash

    return str(get_hash(algorithm, file.read()))


def _decompress(compression: str | None, content: bytes) -> bytes:
    from streaming.base.compression import decompress

    return bytes(decompress(compression, content))
