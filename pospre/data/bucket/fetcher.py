"""Fetches shards of a bucket into the local cache: requested ones at once, later ones in advance.

Every shard is downloaded by its own daemon thread, which holds only kernel locks and a ``.part``
file. The process can therefore end at any time, and the next one finds a consistent cache.
"""

import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor
from tqdm import tqdm

from pospre.data.bucket.cache import ShardCache, allow_many_files
from pospre.data.bucket.download import PATIENCE_HINT, NotNow, ShardDownload, Stopped
from pospre.data.bucket.reading_plan import ReadingPlan
from pospre.data.stores.mds import Shard, load_shard
from pospre.data.stores.mds_index import ShardEntry
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket

_AHEAD = 32  # shards
_AT_ONCE = 4  # concurrent downloads in advance
_READS = 2  # attempts after which an error is not explained by an evicted shard
_LOOKS = 3  # checks of a shard for damage in the cache; each hashes all of it
_TICK = 0.1  # seconds between checks for locks or room that other processes hold
_GOODBYE = 1.0  # seconds that ``close`` waits for the threads; a silent server may block longer


class Fetcher:
    """Fetches the shards of a remote data set to this machine when they are needed.

    One shard may take ``patience`` seconds. ``tags`` are the ETags that shards without recorded
    hashes must have, by name.
    """

    def __init__(
        self,
        bucket: Bucket,
        entries: Sequence[ShardEntry],
        cache: ShardCache,
        patience: float,
        tags: Mapping[str, str],
    ) -> None:
        self.downloaded = 0  # bytes
        self.share = 1.0  # of the cache's limit that this plan may use; other ranks fetch, too
        self._bucket, self._entries, self._cache = bucket, entries, cache
        self._patience, self._tags = patience, tags
        self._changed = threading.Condition()
        self._here: dict[int, Shard] = {}  # with a limit: kept open, so that they are not evicted
        self._looks: Counter[int] = Counter()  # checks for damage in the cache
        self._is_line_due = sys.stderr.isatty() and _rank() == 0
        self._is_open = True
        self._follow(np.empty(0, np.int64))
        if cache.limit is not None:
            allow_many_files()

    def _follow(self, shards: np.ndarray) -> None:
        """Replace the old plan and drop its pending downloads."""
        self._plan = ReadingPlan(shards)
        self._stop = threading.Event()
        self._coming: dict[int, ShardDownload] = {}
        self._failed: set[int] = set()  # until a reader requests them
        self._later: set[int] = set()  # postponed: no room, or another process has them
        self._retry = np.inf  # when to retry these

    def expect(self, shards: np.ndarray) -> None:
        """Fetch in advance the shards of these samples, int64 (n,), in this order."""
        self.close()
        with self._changed:
            self._follow(shards)
            self._is_open = True
            self._fetch_ahead()

    def close(self) -> None:
        """Stop the threads and waiting readers; nothing is fetched any more."""
        with self._changed:
            self._is_open = False
            self._stop.set()
            if self._cache.limit is not None:
                self._here.clear()  # others may evict them from now on
            threads = [coming.thread for coming in self._coming.values() if coming.thread]
            self._changed.notify_all()
        end = time.monotonic() + _GOODBYE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def read(self, shard_index: int, number: int) -> Tensor:
        """Return a sample of a shard, uint8 (N,).

        If it cannot be read, the shard is checked again, and fetched again if another process has
        evicted or truncated it. ``UserError`` if it cannot be fetched, or not in time, or reading
        keeps failing.
        """
        self._advance(shard_index)
        try:
            return self._try(shard_index, number)
        finally:
            self._release(shard_index)  # no caller holds the shard open any more

    def _try(self, shard_index: int, number: int) -> Tensor:
        for _ in range(_READS):
            shard = self._here.get(shard_index) or self._wait(shard_index)
            try:
                return shard.read(number)
            except UserError:
                self._here.pop(shard_index, None)
        return self._wait(shard_index).read(number)

    def heal(self, shard_index: int) -> bool:
        """Verify a shard in the cache, and remove it if it has changed; reading fetches it again.

        Return whether reading again may help. A shard that is damaged repeatedly is kept, and so is
        one that is damaged in the bucket.
        """
        with self._changed:
            self._looks[shard_index] += 1
            if self._looks[shard_index] > _LOOKS:
                return False
        entry = self._entries[shard_index].raw
        problem = self._cache.remove_damaged(entry, self._patience, self._stop)
        if problem:
            self._here.pop(shard_index, None)
            warnings.warn(
                f"{self._cache.file(entry.flat_name)} was damaged in the cache ({problem}); it is "
                f"fetched again from {self._address(shard_index)}",
                stacklevel=2,
            )
        return True

    def _advance(self, shard_index: int) -> None:
        """Record the reading's progress in the plan."""
        with self._changed:
            if self._plan.ask(shard_index) or time.monotonic() > self._retry:
                self._later.clear()
                self._fetch_ahead()

    def _release(self, shard_index: int) -> None:
        """Allow eviction of a shard after its last read."""
        with self._changed:
            left = self._plan.count_read(shard_index)
            if left > 0:
                return
            self._cache.touch(self._entries[shard_index].raw.flat_name)
            if self._cache.limit is not None:
                self._here.pop(shard_index, None)
            if left == 0:
                self._later.clear()
                self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Start downloads of the next shards of the plan; the lock is held."""
        self._retry = np.inf
        room = self.share * (self._cache.limit or np.inf)
        room -= sum(self._entries[shard_index].raw.size for shard_index in self._plan.begun)
        for shard_index in self._plan.ahead(_AHEAD):
            room -= self._entries[shard_index].raw.size
            if room < 0 or len(self._coming) >= _AT_ONCE or not self._is_open:
                return  # it would take room from shards that are needed earlier
            books = (self._here, self._coming, self._failed, self._later)
            if any(shard_index in book for book in books):
                continue
            if not self._cache.holds(self._entries[shard_index].raw):
                self._fetch(shard_index, urgent=False)

    def _fetch(self, shard_index: int, *, urgent: bool) -> ShardDownload:
        """Start the download of a shard; the lock is held."""
        entry = self._entries[shard_index]
        self._coming[shard_index] = coming = ShardDownload(
            shard_index,
            entry,
            self._bucket,
            self._patience,
            tag=self._tags.get(entry.stored.name, ""),
            urgent=urgent,
            stop=self._stop,
        )
        coming.thread = threading.Thread(
            target=self._work, args=(coming,), daemon=True, name=f"pospre-fetch-{shard_index}"
        )
        coming.thread.start()
        return coming

    def _work(self, coming: ShardDownload) -> None:
        """Download a shard, in a thread."""
        shard_index = coming.shard_index
        later: Sequence[int] = ()
        try:
            self._bring(coming)
            if self._load(shard_index) is None:  # it was evicted at once
                later = [shard_index]
        except Stopped:
            pass
        except NotNow as error:
            later = self._plan.shards if error.no_room else [shard_index]
        except Exception as error:  # raised in the reader that waits for this shard
            coming.error = error
        with self._changed:
            coming.is_over = True
            if self._coming.get(shard_index) is coming:  # the plan has not changed
                del self._coming[shard_index]
                if coming.error is not None:
                    self._failed.add(shard_index)
                self._later.update(later)
                self._fetch_ahead()
                if later:
                    self._retry = time.monotonic() + _TICK
            self._changed.notify_all()

    def _bring(self, coming: ShardDownload) -> None:
        try:
            coming.bring(self._cache, self._needs)
        finally:
            with self._changed:
                self.downloaded += coming.received

    def _needs(self) -> dict[str, float]:
        """Return when shards are needed, by name."""
        with self._changed:
            needs = self._plan.needs()
        return {
            self._entries[shard_index].raw.flat_name: need for shard_index, need in needs.items()
        }

    def _wait(self, shard_index: int) -> Shard:
        """Return a shard as soon as it is in the cache."""
        shard = self._load(shard_index)
        if shard is not None:
            return shard
        start = time.monotonic()
        coming: ShardDownload | None = None
        with self._changed, self._line(shard_index) as line:
            while (shard := self._here.get(shard_index)) is None:
                self._check(shard_index, coming, time.monotonic() - start)
                if time.monotonic() > self._retry:
                    self._later.clear()
                    self._fetch_ahead()
                if coming is None or coming.is_over:
                    coming = self._coming.get(shard_index) or self._fetch(shard_index, urgent=True)
                self._changed.wait(_TICK)
                line.update(coming.download.done - line.n)
            return shard

    def _check(self, shard_index: int, coming: ShardDownload | None, seconds: float) -> None:
        """Raise an error if waiting is useless."""
        error = None if coming is None else coming.error
        if error is not None and not isinstance(error, UserError):
            raise error
        if error is None and not self._is_open:
            error = UserError("reading was ended")
        elif error is None and coming is not None and seconds > self._patience:
            state = coming.download.state(self._entries[shard_index].stored.size)
            error = Unreachable(f"{state} ({PATIENCE_HINT})")
        if error is not None:
            raise error.restated(
                f"rank {_rank()} waited {seconds:.1f} s for shard {self._address(shard_index)}: "
                f"{str(error).rstrip('.')}."
            ) from error

    def _line(self, shard_index: int) -> "tqdm[None]":
        """Return a progress line: on a terminal, for the first shard that a reader waits for."""
        is_due, self._is_line_due = self._is_line_due, False
        name, size = self._address(shard_index), self._entries[shard_index].stored.size
        return tqdm(
            desc=name, total=size, unit="B", unit_scale=True, file=sys.stderr, disable=not is_due
        )

    def _address(self, shard_index: int) -> str:
        return f"{self._bucket.uri}/{self._entries[shard_index].stored.name}"

    def _load(self, shard_index: int) -> Shard | None:
        """Return a shard in the cache, and record it."""
        entry = self._entries[shard_index]
        if not self._cache.holds(entry.raw):
            return None
        file = None
        if self._cache.limit is not None:
            file = self._cache.open(entry.raw.flat_name)
            if file is None:
                return None
        try:
            shard = load_shard(self._cache.file(entry.raw.flat_name), entry, "")
        except UserError:  # just evicted, or damaged by another program: fetch it again
            self._cache.file(entry.raw.flat_name).unlink(missing_ok=True)
            return None
        with self._changed:
            self._here[shard_index] = shard = replace(shard, file=file)
        return shard


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
