"""Which shards will be read, in which order, and the progress of reading."""

from collections import Counter

import numpy as np


class ReadingPlan:
    """The shards of the samples to read; callers hold the fetcher's lock.

    ``shards`` are the samples' shards, int64 (n,), in reading order.

    Attributes:
        shards: every shard once, in the order of their first samples.
        begun: shards that were requested or skipped, and have samples left to read.
    """

    def __init__(self, shards: np.ndarray) -> None:
        indices, first, count = np.unique(shards, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.shards: list[int] = indices[order].tolist()
        self.begun: set[int] = set()
        self._position = {shard: number for number, shard in enumerate(self.shards)}
        self._left = Counter(dict(zip(self.shards, count[order].tolist(), strict=True)))
        self._next = 0  # index of the first shard not requested yet

    def ask(self, shard: int) -> bool:
        """Record that a shard is requested; return whether it is the first time."""
        position = self._position.get(shard, -1)
        if position < self._next:
            return False
        self.begun.update(self.shards[self._next : position + 1])
        self._next = position + 1
        return True

    def count_read(self, shard: int) -> int:
        """Record that a sample was read; return its shard's remaining samples, −1 if unplanned."""
        self._left[shard] -= 1
        if self._left[shard] <= 0:
            self.begun.discard(shard)
        return self._left[shard]

    def ahead(self, count: int) -> list[int]:
        """Return the next shards that were not requested."""
        return self.shards[self._next : self._next + count]

    def needs(self) -> dict[int, float]:
        """Return when shards are needed: their positions in the plan."""
        return {
            shard: float(self._position[shard]) for shard, left in self._left.items() if left > 0
        }
