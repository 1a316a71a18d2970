"""Which shards will be read, in which order, and how far the reading has come."""

from collections import Counter

import numpy as np


class ReadingPlan:
    """The shards of the samples that will be read; callers hold the fetcher's lock.

    Args:
        places: of each sample's shard, int64 (n,), in the order of reading.

    Attributes:
        shards: every shard once, in the order of their first samples.
        begun: shards that were asked for, or passed over, and have samples left to read.
    """

    def __init__(self, places: np.ndarray) -> None:
        found, first, count = np.unique(places, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.shards: list[int] = found[order].tolist()
        self.begun: set[int] = set()
        self._position = {place: number for number, place in enumerate(self.shards)}
        self._left = Counter(dict(zip(self.shards, count[order].tolist(), strict=True)))
        self._next = 0  # shards not asked for so far start here

    def ask(self, place: int) -> bool:
        """Note that a shard is asked for; tell whether that is news."""
        position = self._position.get(place, -1)
        if position < self._next:
            return False
        self.begun.update(self.shards[self._next : position + 1])
        self._next = position + 1
        return True

    def count_read(self, place: int) -> int:
        """Note that a sample was read; return how many of its shard are left, −1 if unplanned."""
        self._left[place] -= 1
        if self._left[place] <= 0:
            self.begun.discard(place)
        return self._left[place]

    def ahead(self, count: int) -> list[int]:
        """Return the next shards that were not asked for."""
        return self.shards[self._next : self._next + count]

    def needs(self) -> dict[int, float]:
        """Tell when shards will be needed: their positions among all."""
        return {
            place: float(self._position[place]) for place, left in self._left.items() if left > 0
        }
