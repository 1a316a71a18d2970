"""A source divided into blocks, each converted by one worker and stored as one shard.

The division depends only on the source and the settings, so the result is the same for any number
of processes, machines and interruptions.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pospre.errors import UserError

_BLOCK_BYTES = 1 << 26
_LEAST_BLOCK_BYTES = 1 << 22
_ENOUGH_BLOCKS = 64  # for one machine's workers; small data sets get smaller blocks
_LEAST_ITEM_BYTES = 1 << 12  # limits the number of tiny files in one block
_UNKNOWN_ITEM_BYTES = 100_000
_REACH = 8  # a cut may move by this fraction of a block


class Block(NamedTuple):
    """The items from ``start`` up to ``stop`` of a source."""

    number: int
    start: int
    stop: int
    key: str = ""  # of everything that determines its bytes


class Share(NamedTuple):
    """The ``number``-th of ``total`` shares of a conversion, counted from 1."""

    number: int
    total: int

    def of(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return this share's blocks, which are consecutive.

        Raises:
            UserError: there are fewer blocks than shares.
        """
        if self.total > len(blocks):
            raise UserError(
                f"--part {self.number}/{self.total}: this source is converted in {len(blocks)} "
                f"blocks, so there are at most {len(blocks)} parts; a smaller --shard-mb gives "
                "more."
            )
        first, last = (len(blocks) * k // self.total for k in (self.number - 1, self.number))
        return blocks[first:last]


def parse_share(text: str) -> Share:
    """Parse ``k/n``; raise UserError unless k is from 1 to n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    share = Share(*map(int, match.groups())) if match else Share(0, 0)
    if not 1 <= share.number <= share.total:
        raise UserError(f"--part {text} must be k/n with k from 1 to n, such as 3/16.")
    return share


def cut_blocks(names: Sequence[str], sizes: Sequence[int], shard_mb: float | None) -> list[Block]:
    """Divide items into blocks of about equal bytes.

    The names determine the exact cuts, so that few blocks change if an item is added or removed.

    Args:
        names: of the items.
        sizes: bytes of every item, 0 if unknown.
        shard_mb: size of a block; default: 64 MiB, or less for small data sets.
    """
    known = np.array(sizes, np.int64)
    costs = np.where(known > 0, np.maximum(known, _LEAST_ITEM_BYTES), _UNKNOWN_ITEM_BYTES)
    ends = np.cumsum(costs)
    total = int(ends[-1])
    wanted = min(max(total // _ENOUGH_BLOCKS, _LEAST_BLOCK_BYTES), _BLOCK_BYTES)
    if shard_mb is not None:
        wanted = max(1, round(shard_mb * 1e6))
    count = -(-total // wanted)
    goals = [total * number // count for number in range(1, count)]
    reach = total // count // _REACH
    last = len(known) - 1
    windows = [np.searchsorted(ends, (goal - reach, goal + reach)) + 1 for goal in goals]
    cuts = [_cut(names, low, min(high, last)) for low, high in windows if low <= last]
    bounds = np.unique([0, *cuts, len(known)]).tolist()
    pairs = itertools.pairwise(bounds)
    return [Block(number, start, stop) for number, (start, stop) in enumerate(pairs)]


def _cut(names: Sequence[str], low: int, high: int) -> int:
    """Return the position, from low to high, whose name has the smallest hash."""
    positions = range(low, high + 1)
    return min(positions, key=lambda n: hashlib.blake2b(os.fsencode(names[n])).digest())
