"""How a reader gets the bytes of its samples from local files, and who keeps them in memory.

``"os"``: plain reads through the page cache of the operating system, which is told a little ahead
what will be read. Best where the data fit into memory: from the second epoch on nothing is read.

``"process"``: threads of our own read the samples that come next into this process, up to a number
of bytes, and the operating system is told to forget them. For network file systems, whose answers
take long, and for data larger than memory, which would push everything else out of the page cache.
"""

import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pospre.data.stores.files import OpenFiles, read_bytes, will_read
from pospre.errors import UserError, suggestion

READ_AHEAD_BYTES = 256 << 20
PAGE_CACHES = ("os", "process")

_HINTED_SAMPLES = 256  # threads read that far apart from each other
_NUM_THREADS = 16
_LONGEST_READ = 1 << 20  # neighbours in the file are read at once, up to this many bytes
_MOST_SAMPLES = 4096  # ahead, however small they are: `expect` should return at once


class Place(NamedTuple):
    """Where a sample's bytes lie."""

    path: Path
    offset: int
    size: int


class SampleBytes(ABC):
    """Reads samples for a ``Reader``, which hands its ``expect`` and ``close`` on."""

    def __init__(self, place: Callable[[int], Place]) -> None:
        """Keep ``place``, which finds a sample; it must be quick and good for several threads."""
        self._place = place

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """Return a sample's bytes, uint8 (N,); raises UserError when they cannot be read."""

    @abstractmethod
    def expect(self, indices: np.ndarray) -> None:
        """Hear which samples will be read from now on, in order; replaces what was expected."""

    @abstractmethod
    def close(self) -> None:
        """End what ``expect`` started; it may be called again."""


def sample_bytes(page_cache: str, place: Callable[[int], Place]) -> SampleBytes:
    """Return the way to read samples that ``page_cache`` names: ``"os"`` or ``"process"``."""
    if page_cache not in PAGE_CACHES:
        hint = suggestion(page_cache, PAGE_CACHES)
        raise UserError(f"page_cache '{page_cache}' is unknown.{hint}")
    return SystemCache(place) if page_cache == "os" else ReadAhead(place)


class SystemCache(SampleBytes):
    """Reads through the operating system's page cache, and hints at what comes next."""

    def __init__(self, place: Callable[[int], Place]) -> None:
        super().__init__(place)
        self._coming: Iterator[int] = iter(())
        self._files = OpenFiles()

    def read(self, index: int) -> Tensor:
        """Return a sample's bytes."""
        for coming in itertools.islice(self._coming, 1):
            self._hint(coming)
        return read_bytes(*self._place(index), files=self._files)

    def expect(self, indices: np.ndarray) -> None:
        """Ask the kernel for the first samples; each read then asks for one more."""
        self._coming = map(int, indices) if hasattr(os, "posix_fadvise") else iter(())
        for coming in itertools.islice(self._coming, _HINTED_SAMPLES):
            self._hint(coming)

    def close(self) -> None:
        """Stop hinting, and let the files go."""
        self._coming = iter(())
        self._files.forget()

    def _hint(self, index: int) -> None:
        will_read(*self._place(index), self._files)


class ReadAhead(SampleBytes):
    """Reads the samples that come next ahead of their use, into memory of this process.

    Samples that were not expected, or that come before they were fetched, are read directly.
    """

    def __init__(
        self,
        place: Callable[[int], Place],
        *,
        num_bytes: int = READ_AHEAD_BYTES,
        num_threads: int = _NUM_THREADS,
    ) -> None:
        """Hold at most ``num_bytes`` that nobody has asked for yet."""
        super().__init__(place)
        self._num_bytes = num_bytes
        self._num_threads = num_threads
        self._ahead: _Ahead | None = None
        self._files = OpenFiles()

    def read(self, index: int) -> Tensor:
        """Return a sample's bytes, fetched ahead or read now."""
        ahead = self._ahead
        data = None if ahead is None else ahead.take(index)
        if data is not None:
            return data
        return read_bytes(*self._place(index), keep=False, files=self._files)

    def expect(self, indices: np.ndarray) -> None:
        """Start fetching these samples in this order."""
        self.close()
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="pospre-read-ahead")
        self._ahead = _Ahead(self._place, indices, self._num_bytes, pool, self._files)

    def close(self) -> None:
        """Stop fetching, wait for the reads that are under way, and free the memory."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()
        self._files.forget()


@dataclass(eq=False)
class _Slot:
    """A sample that is being fetched, alone or with its neighbours in the file."""

    place: Place
    uses: int
    data: Tensor | None = None
    fetched: Future[None] | None = None


class _Ahead:
    """What is fetched of one order of samples."""

    def __init__(
        self,
        place: Callable[[int], Place],
        indices: np.ndarray,
        num_bytes: int,
        pool: ThreadPoolExecutor,
        files: OpenFiles,
    ) -> None:
        self._place = place
        self._files = files
        self._num_bytes = num_bytes
        self._pool = pool
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._held = 0
        self._overtaken: Counter[int] = Counter()  # reads of samples that nobody had fetched yet
        starts = np.flatnonzero(np.diff(indices, prepend=-1))  # repeats in a row are fetched once
        self._samples = indices[starts]
        self._uses = np.diff(starts, append=len(indices))
        self._next = 0
        with self._lock:
            self._fetch()

    def take(self, index: int) -> Tensor | None:
        """Return an expected sample's bytes, or None: it must be read directly."""
        with self._lock:
            slot = self._slots.get(index)
            if slot is not None:
                slot.uses -= 1
                if slot.uses == 0:
                    del self._slots[index]
                    self._held -= slot.place.size
            elif self._next < len(self._samples):
                self._overtaken[index] += 1
            self._fetch()
        if slot is None:
            return None
        assert slot.fetched is not None
        try:
            slot.fetched.result()
        except (CancelledError, UserError):  # the direct read succeeds, or says what is wrong
            return None
        return slot.data

    def stop(self) -> None:
        """End the threads and forget everything."""
        with self._lock:
            self._next = len(self._samples)
            self._slots.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self) -> None:
        """Have the next samples read until enough is held; the caller holds the lock."""
        if self._held > self._num_bytes * 7 // 8:  # wait until several reads may become one
            return
        group: list[_Slot] = []
        while self._next < len(self._samples) and len(self._slots) < _MOST_SAMPLES:
            index = int(self._samples[self._next])
            place = self._place(index)
            if self._held + place.size > self._num_bytes and self._slots:
                break
            uses = int(self._uses[self._next]) - self._overtaken.pop(index, 0)
            self._next += 1
            if uses <= 0 or place.size > self._num_bytes:
                continue
            if index in self._slots:
                self._slots[index].uses += uses
                continue
            self._held += place.size
            slot = self._slots[index] = _Slot(place, uses)
            if group and not _is_next(group, place):
                self._submit(group)
                group = []
            group.append(slot)
        self._submit(group)

    def _submit(self, group: list[_Slot]) -> None:
        if group:
            fetched = self._pool.submit(_fill, group, self._files)
            for slot in group:
                slot.fetched = fetched


def _is_next(group: list[_Slot], place: Place) -> bool:
    """Tell whether a sample lies directly behind a group of them and may be read with it."""
    path, start, _ = group[0].place
    _, offset, size = group[-1].place
    end = place.offset + place.size
    return (path, offset + size) == place[:2] and end - start <= _LONGEST_READ


def _fill(group: list[_Slot], files: OpenFiles) -> None:
    """Read neighbours at once, and give each memory of its own, to be freed when it was used."""
    path, start, _ = group[0].place
    end = group[-1].place.offset + group[-1].place.size
    data = read_bytes(path, start, end - start, keep=False, files=files)
    if len(group) == 1:
        group[0].data = data
        return
    for slot in group:
        begin = slot.place.offset - start
        slot.data = data[begin : begin + slot.place.size].clone()
