"""Threads that bring shards from a bucket into the local cache: what is waited for, then ahead.

The threads are daemons and hold nothing but a lock of the kernel's and a ``.part`` file: whatever
happens to them, the process can end, and the next one finds the cache in order.
"""

import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from pospre.data.bucket.arrival import Supplier
from pospre.data.bucket.progress import Progress, rank
from pospre.data.bucket.transfer import PATIENCE_HINT, Stopped, Transfer
from pospre.data.stores.mds import Shard, load_shard
from pospre.data.stores.mds_index import ShardEntry
from pospre.errors import UserError

NUM_THREADS = 4
AHEAD = 32  # shards

T = TypeVar("T")

_READS = 2  # after which an error is not taken for an evicted shard
_LOOKS = 3  # at a shard for damage in the cache; they take as long as a hash of all of it
_TICK = 0.1  # seconds: how soon a lock or room that other processes hold is looked at again
_GOODBYE = 1.0  # seconds that ``close`` gives the threads; a silent server may hold them longer


class Fetcher:
    """The shards of a remote data set, brought to this machine when they are needed.

    Args:
        entries: the shards.
        supplier: brings one.

    Attributes:
        downloaded: bytes that came over the network for this object.
    """

    def __init__(self, entries: Sequence[ShardEntry], supplier: Supplier) -> None:
        self.downloaded = 0
        self._entries = entries
        self._supplier = supplier
        self._cache = supplier.cache
        self._changed = threading.Condition()
        self._here: dict[int, Shard] = {}
        self._users: Counter[int] = Counter()  # reads that are going on
        self._waiting: Counter[int] = Counter()
        self._failed: dict[int, Exception] = {}
        self._looks: Counter[int] = Counter()  # for damage in the cache
        self._progress = Progress()
        self._is_open = True
        self._begin()

    def _begin(self, places: np.ndarray | None = None) -> None:
        """Forget the old plan and its threads."""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._active: dict[int, Transfer | None] = {}
        self._later: dict[int, float] = {}  # when to try again
        self._given_up: set[int] = set()
        self._plan: list[int] = []
        self._position: dict[int, int] = {}
        self._left: Counter[int] = Counter()  # reads that are still to come
        self._begun: set[int] = set()  # of the plan: read from, and not for the last time
        self._next = 0  # what nobody has asked for so far starts here in the plan
        if places is not None:
            found, first, count = np.unique(places, return_index=True, return_counts=True)
            order = np.argsort(first)
            self._plan = found[order].tolist()
            self._position = {place: number for number, place in enumerate(self._plan)}
            self._left = Counter(dict(zip(self._plan, count[order].tolist(), strict=True)))

    def expect(self, places: np.ndarray) -> None:
        """Bring ahead the shards of the samples that will be read, int64 (n,), in this order."""
        self.close()
        with self._changed:
            self._begin(places)
            self._is_open = True
        if any(not self._cache.holds(self._entries[place].raw) for place in self._plan):
            self._start()

    def close(self) -> None:
        """End the threads, and the waiting of whoever reads; nothing is fetched any more."""
        with self._changed:
            self._is_open = False
            self._stop.set()
            self._cache.let_all_go()
            if self._cache.limit is not None:
                self._here.clear()  # others may evict them from now on
            threads, self._threads = self._threads, []
            self._changed.notify_all()
        end = time.monotonic() + _GOODBYE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def read(self, place: int, action: Callable[[Shard], T]) -> T:
        """Return what ``action`` makes of a shard; this process does not evict it meanwhile.

        Where ``action`` fails with a UserError, the shard is looked at anew, and fetched anew if
        another process has evicted it or cut it off.

        Raises:
            UserError: the shard cannot be had, or not in time, or ``action`` fails all the same.
        """
        with self._using(place):
            for _ in range(_READS):
                shard = self._here.get(place) or self._wait(place)
                try:
                    return action(shard)
                except UserError:
                    with self._changed:
                        self._here.pop(place, None)
            return action(self._wait(place))

    def heal(self, place: int) -> bool:
        """Compare a shard in the cache with its hashes, and remove it if it is another by now.

        It is fetched again when it is read. Return whether reading again may help: a shard that is
        damaged again and again is left as it is, as is one that is damaged in the bucket.
        """
        with self._changed:
            if self._looks[place] >= _LOOKS:
                return False
            self._looks[place] += 1
        entry = self._entries[place]
        problem = self._supplier.remove_damaged(entry)
        if problem:
            with self._changed:
                self._here.pop(place, None)
            warnings.warn(
                f"{self._cache.file(entry.raw.name)} was damaged in the cache ({problem}): it is "
                f"fetched again from {self._address(place)}",
                stacklevel=2,
            )
        return True

    @contextmanager
    def _using(self, place: int) -> Iterator[None]:
        """Note that a shard is being read, and how far in the plan the reading has come."""
        with self._changed:
            self._users[place] += 1
            if self._position.get(place, -1) >= self._next:
                self._begun.update(self._plan[self._next : self._position[place] + 1])
                self._next = self._position[place] + 1
                self._changed.notify_all()
        try:
            yield
        finally:
            self._release(place)

    def _release(self, place: int) -> None:
        with self._changed:
            self._users[place] -= 1
            self._left[place] -= 1
            if self._left[place] == 0:
                self._begun.discard(place)
                self._cache.touch(self._entries[place].raw.name)
                self._cache.let_go(self._entries[place].raw.name)
                self._changed.notify_all()

    def _start(self) -> None:
        with self._changed:
            if not self._threads and self._is_open:
                arguments = (self._stop, self._active)
                self._threads = [
                    threading.Thread(
                        target=self._work,
                        args=arguments,
                        daemon=True,
                        name=f"pospre-fetch-{number}",
                    )
                    for number in range(NUM_THREADS)
                ]
                for thread in self._threads:
                    thread.start()

    # for those who read

    def _wait(self, place: int) -> Shard:
        shard = self._arrived(place)
        if shard is not None:
            return shard
        self._start()
        start = time.monotonic()
        with self._changed, self._progress.bar(self._address(place)) as bar:
            self._failed.pop(place, None)
            self._waiting[place] += 1
            self._changed.notify_all()
            try:
                while (shard := self._here.get(place)) is None:
                    self._check(place, time.monotonic() - start)
                    self._changed.wait(_TICK)
                    bar.show(self._active.get(place), self._entries[place].stored.size)
                return shard
            finally:
                self._waiting -= Counter((place,))  # drops it at zero

    def _check(self, place: int, seconds: float) -> None:
        """Raise an error if there is nothing more to wait for."""
        error = self._failed.get(place)
        cause = ""
        if error is not None:
            if not isinstance(error, UserError):
                raise error
            cause = str(error)
        elif not self._is_open:
            cause = "reading was ended"
        elif seconds > self._supplier.patience:
            cause = f"{self._state(place)} ({PATIENCE_HINT})"
        if cause:
            raise UserError(
                f"rank {rank()} waited {seconds:.1f} s for shard {self._address(place)}: "
                f"{cause.rstrip('.')}."
            ) from error

    def _state(self, place: int) -> str:
        transfer = self._active.get(place)
        if transfer is None:
            return "other shards, or another process that downloads it, are before it"
        size = self._entries[place].stored.size
        last = f"; the last failure: {transfer.cause}" if transfer.cause else ""
        return f"{transfer.done} of {size} bytes came in {transfer.attempts} attempts{last}"

    def _address(self, place: int) -> str:
        return f"{self._supplier.bucket.uri}/{self._entries[place].stored.name}"

    def _arrived(self, place: int) -> Shard | None:
        """Return a shard that lies in the cache, and take note of it."""
        entry = self._entries[place]
        with self._changed:
            if self._left[place] > 0:  # other ranks, a little ahead, may have done with it
                self._cache.keep(entry.raw.name)
        if not self._cache.holds(entry.raw):
            return None
        try:
            shard = load_shard(self._cache.file(entry.raw.name), entry, "")
        except UserError:  # evicted just now, or damaged behind our back: fetch it again
            self._cache.file(entry.raw.name).unlink(missing_ok=True)
            return None
        with self._changed:
            self._here[place] = shard
        return shard

    # for the threads

    def _work(self, stop: threading.Event, active: dict[int, Transfer | None]) -> None:
        while True:
            with self._changed:
                while (job := None if stop.is_set() else self._choose()) is None:
                    if stop.is_set():
                        return
                    self._changed.wait(_TICK if self._later else None)
                active[job[0]] = None
            self._fetch(*job, stop, active)

    def _choose(self) -> tuple[int, bool] | None:
        """Return the shard to fetch next, and whether it is waited for."""
        for place in self._waiting:
            if not any(place in book for book in (self._active, self._failed, self._here)):
                return place, True
        now = time.monotonic()
        self._later = {place: when for place, when in self._later.items() if when > now}
        room = self._cache.limit or math.inf
        room -= sum(self._entries[place].raw.size for place in self._begun)
        for place in self._plan[self._next : self._next + AHEAD]:
            room -= self._entries[place].raw.size
            if room < 0:  # it would only push out what is needed before it
                break
            if place in self._active or place in self._later or place in self._given_up:
                continue
            if not self._cache.holds(self._entries[place].raw):
                return place, False
        return None

    def _fetch(
        self,
        place: int,
        urgent: bool,
        stop: threading.Event,
        active: dict[int, Transfer | None],
    ) -> None:
        tries: list[Transfer] = []

        def watch(transfer: Transfer) -> None:
            tries.append(transfer)
            active[place] = transfer

        error: Exception | None = None
        there = False
        try:
            there = self._supplier.bring(
                self._entries[place], needs=self._needs, urgent=urgent, stop=stop, watch=watch
            )
            there = there and self._arrived(place) is not None
        except Stopped:
            pass
        except Exception as caught:  # raised by whoever waits for this shard
            error = caught
        with self._changed:
            active.pop(place, None)
            self.downloaded += sum(transfer.received for transfer in tries)
            if error is None:
                if not there:  # no room, or others are at it
                    self._later[place] = time.monotonic() + _TICK
            elif place in self._waiting:
                self._failed[place] = error
            else:  # until somebody asks for it
                self._given_up.add(place)
            self._changed.notify_all()

    def _needs(self) -> dict[str, float]:
        """Tell when shards will be needed: their position in the plan; −1 while being read."""
        with self._changed:
            needs = {
                place: float(self._position[place]) for place, n in self._left.items() if n > 0
            }
            needs |= {place: -1.0 for place, number in self._users.items() if number > 0}
        return {self._entries[place].raw.name: need for place, need in needs.items()}
