"""The shards of a bucket, brought into the local cache: what is waited for at once, others ahead.

Every shard comes by a daemon thread of its own, which holds nothing but locks of the kernel's and a
``.part`` file: whatever happens to it, the process can end, and the next one finds the cache in
order.
"""

import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from pospre.data.bucket.arrival import Arrival, NotNow
from pospre.data.bucket.cache import ShardCache, allow_many_files
from pospre.data.bucket.download import PATIENCE_HINT, Stopped
from pospre.data.bucket.plan import ReadingPlan
from pospre.data.stores.mds import Shard, load_shard
from pospre.data.stores.mds_index import ShardEntry
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket

T = TypeVar("T")

_AHEAD = 32  # shards
_AT_ONCE = 4  # shards that come ahead
_READS = 2  # after which an error is not taken for an evicted shard
_LOOKS = 3  # at a shard for damage in the cache; they take as long as a hash of all of it
_TICK = 0.1  # seconds: how soon a lock or room that other processes hold is looked at again
_GOODBYE = 1.0  # seconds that ``close`` gives the threads; a silent server may hold them longer


class Fetcher:
    """The shards of a remote data set, brought to this machine when they are needed.

    Args:
        bucket: the data set.
        entries: its shards.
        cache: where they go.
        patience: seconds that one may take.

    Attributes:
        downloaded: bytes that came over the network for this object.
        share: the part of the cache's limit that this plan may fill; other ranks fetch, too.
    """

    def __init__(
        self, bucket: Bucket, entries: Sequence[ShardEntry], cache: ShardCache, patience: float
    ) -> None:
        self.downloaded = 0
        self.share = 1.0
        self._bucket = bucket
        self._entries = entries
        self._cache = cache
        self._patience = patience
        self._changed = threading.Condition()
        self._here: dict[int, Shard] = {}  # with a limit: open, so that they are not evicted
        self._looks: Counter[int] = Counter()  # for damage in the cache
        self._is_line_due = sys.stderr.isatty() and _rank() == 0
        self._is_open = True
        self._follow(np.empty(0, np.int64))
        if cache.limit is not None:
            allow_many_files()

    def _follow(self, places: np.ndarray) -> None:
        """Forget the old plan and what was coming for it."""
        self._plan = ReadingPlan(places)
        self._stop = threading.Event()
        self._coming: dict[int, Arrival] = {}
        self._failed: set[int] = set()  # until a reader waits for them
        self._later: set[int] = set()  # there was no room, or another process is at it
        self._retry = np.inf  # when to look at these again

    def expect(self, places: np.ndarray) -> None:
        """Bring ahead the shards of the samples that will be read, int64 (n,), in this order."""
        self.close()
        with self._changed:
            self._follow(places)
            self._is_open = True
            self._fetch_ahead()

    def close(self) -> None:
        """End the threads and the waiting of readers; nothing is fetched any more."""
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

    def read(self, place: int, action: Callable[[Shard], T]) -> T:
        """Return what ``action`` makes of a shard; no process evicts it meanwhile.

        Where ``action`` fails with a UserError, the shard is looked at anew, and fetched anew if
        another process has evicted it or cut it off.

        Raises:
            UserError: the shard cannot be had, or not in time, or ``action`` fails all the same.
        """
        self._advance(place)
        try:
            return self._try(place, action)
        finally:
            self._release(place)  # nothing above holds the shard open any more

    def _try(self, place: int, action: Callable[[Shard], T]) -> T:
        for _ in range(_READS):
            shard = self._here.get(place) or self._wait(place)
            try:
                return action(shard)
            except UserError:
                self._here.pop(place, None)
        return action(self._wait(place))

    def heal(self, place: int) -> bool:
        """Compare a shard in the cache with its hashes, and remove it if it is another by now.

        It is fetched again when it is read. Return whether reading again may help: a shard that is
        damaged again and again is left as it is, as is one that is damaged in the bucket.
        """
        with self._changed:
            self._looks[place] += 1
            if self._looks[place] > _LOOKS:
                return False
        entry = self._entries[place].raw
        problem = self._cache.remove_damaged(entry, self._patience, self._stop)
        if problem:
            self._here.pop(place, None)
            warnings.warn(
                f"{self._cache.file(entry.name)} was damaged in the cache ({problem}): it is "
                f"fetched again from {self._address(place)}",
                stacklevel=2,
            )
        return True

    # the plan, and what comes ahead

    def _advance(self, place: int) -> None:
        """Note how far in the plan the reading has come."""
        with self._changed:
            if self._plan.ask(place) or time.monotonic() > self._retry:
                self._later.clear()
                self._fetch_ahead()

    def _release(self, place: int) -> None:
        """Let others evict a shard that has been read for the last time."""
        with self._changed:
            left = self._plan.count_read(place)
            if left > 0:
                return
            self._cache.touch(self._entries[place].raw.name)
            if self._cache.limit is not None:
                self._here.pop(place, None)
            if left == 0:
                self._later.clear()
                self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        """Have the next shards of the plan come; the lock is held."""
        self._retry = np.inf
        room = self.share * (self._cache.limit or np.inf)
        room -= sum(self._entries[place].raw.size for place in self._plan.begun)
        for place in self._plan.ahead(_AHEAD):
            room -= self._entries[place].raw.size
            if room < 0 or len(self._coming) >= _AT_ONCE or not self._is_open:
                return  # what comes without room takes it from what is needed before it
            books = (self._here, self._coming, self._failed, self._later)
            if any(place in book for book in books):
                continue
            if not self._cache.holds(self._entries[place].raw):
                self._fetch(place, urgent=False)

    def _fetch(self, place: int, *, urgent: bool) -> Arrival:
        """Have a shard come; the lock is held."""
        entry = self._entries[place]
        self._coming[place] = coming = Arrival(
            place, entry, self._bucket, self._patience, urgent=urgent, stop=self._stop
        )
        coming.start(self._work)
        return coming

    def _work(self, coming: Arrival) -> None:
        """Bring a shard, in a thread."""
        place = coming.place
        later: Sequence[int] = ()
        try:
            self._bring(coming)
            if self._load(place) is None:  # it was evicted at once
                later = [place]
        except Stopped:
            pass
        except NotNow as error:
            later = self._plan.shards if error.no_room else [place]
        except Exception as error:  # raised where a reader waits for this shard
            coming.error = error
        with self._changed:
            coming.is_over = True
            if self._coming.get(place) is coming:  # the plan is still the same
                del self._coming[place]
                if coming.error is not None:
                    self._failed.add(place)
                self._later.update(later)
                self._fetch_ahead()
                if later:
                    self._retry = time.monotonic() + _TICK
            self._changed.notify_all()

    def _bring(self, coming: Arrival) -> None:
        try:
            coming.bring(self._cache, self._needs)
        finally:
            with self._changed:
                self.downloaded += coming.received

    def _needs(self) -> dict[str, float]:
        """Tell when shards will be needed, by their names."""
        with self._changed:
            needs = self._plan.needs()
        return {self._entries[place].raw.name: need for place, need in needs.items()}

    # those who read

    def _wait(self, place: int) -> Shard:
        """Return a shard as soon as it is in the cache."""
        shard = self._load(place)
        if shard is not None:
            return shard
        start = time.monotonic()
        coming: Arrival | None = None
        with self._changed, self._line(place) as line:
            while (shard := self._here.get(place)) is None:
                self._check(place, coming, time.monotonic() - start)
                if time.monotonic() > self._retry:
                    self._later.clear()
                    self._fetch_ahead()
                if coming is None or coming.is_over:
                    coming = self._coming.get(place) or self._fetch(place, urgent=True)
                self._changed.wait(_TICK)
                line.update(coming.download.done - line.n)
            return shard

    def _check(self, place: int, coming: Arrival | None, seconds: float) -> None:
        """Raise an error if there is nothing more to wait for."""
        error = None if coming is None else coming.error
        if error is not None and not isinstance(error, UserError):
            raise error
        if error is None and not self._is_open:
            error = UserError("reading was ended")
        elif error is None and coming is not None and seconds > self._patience:
            state = coming.download.state(self._entries[place].stored.size)
            error = Unreachable(f"{state} ({PATIENCE_HINT})")
        if error is not None:
            raise error.restated(
                f"rank {_rank()} waited {seconds:.1f} s for shard {self._address(place)}: "
                f"{str(error).rstrip('.')}."
            ) from error

    @contextmanager
    def _line(self, place: int) -> "Iterator[tqdm[None]]":
        """Give a progress line: on a terminal, for the first shard that anybody waits for."""
        is_due, self._is_line_due = self._is_line_due, False
        name, size = self._address(place), self._entries[place].stored.size
        with tqdm(
            desc=name, total=size, unit="B", unit_scale=True, file=sys.stderr, disable=not is_due
        ) as line:
            yield line

    def _address(self, place: int) -> str:
        return f"{self._bucket.uri}/{self._entries[place].stored.name}"

    def _load(self, place: int) -> Shard | None:
        """Return a shard that lies in the cache, and take note of it."""
        entry = self._entries[place]
        if not self._cache.holds(entry.raw):
            return None
        file = None
        if self._cache.limit is not None:
            file = self._cache.open(entry.raw.name)
            if file is None:
                return None
        try:
            shard = load_shard(self._cache.file(entry.raw.name), entry, "")
        except UserError:  # evicted just now, or damaged behind our back: fetch it again
            self._cache.file(entry.raw.name).unlink(missing_ok=True)
            return None
        with self._changed:
            self._here[place] = shard = replace(shard, file=file)
        return shard


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
