"""Which shards will be read, in which order, and the progress of reading."""

from collections import Counter

import numpy as np


class ReadingPlan:
    """The shards of the samples to read; callers hold the fetcher's lock.

    ``places`` are the samples' shards, int64 (n,), in reading order.

    Attributes:
        shards: every shard once, in the order of their first samples.
        begun: shards that were requested or skipped, and have samples left to read.
    """

    def __init__(self, places: np.ndarray) -> None:
        found, first, count = np.unique(places, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.shards: list[int] = found[order].tolist()
        self.begun: set[int] = set()
        self._position = {place: number for number, place in enumerate(self.shards)}
        self._left = Counter(dict(zip(self.shards, count[order].tolist(), strict=True)))
        self._next = 0  # index of the first shard not requested yet

    def ask(self, place: int) -> bool:
        """Record that a shard is requested; return whether it is the first time."""
        position = self._position.get(place, -1)
        if position < self._next:
            return False
        self.begun.update(self.shards[self._next : position + 1])
        self._next = position + 1
        return True

    def count_read(self, place: int) -> int:
        """Record that a sample was read; return its shard's remaining samples, −1 if unplanned."""
        self._left[place] -= 1
        if self._left[place] <= 0:
            self.begun.discard(place)
        return self._left[place]

    def ahead(self, count: int) -> list[int]:
        """Return the next shards that were not requested."""
        return self.shards[self._next : self._next + count]

    def needs(self) -> dict[int, float]:
        """Return when shards are needed: their positions in the plan."""
        return {
            place: float(self._position[place]) for place, left in self._left.items() if left > 0
        }
