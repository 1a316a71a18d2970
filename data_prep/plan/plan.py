"""The plan of a conversion, made before the first sample is read, and checks of its completion.

Workers, parts on several machines, and runs after a kill all have the same plan. It divides a
source into blocks, each converted by one worker and stored as one shard. The division depends only
on the source and the settings, so the result is the same for any number of processes, machines and
interruptions.
"""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from data_prep.plan.records import Record, record_name, spans_of
from pospre.errors import UserError

VERSION = 7  # of plans and records; conversions of other versions are not resumed

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
        """Return this share's blocks, which are consecutive."""
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
    """Divide items into blocks of about equal bytes, ``shard_mb`` or 64 MiB (small sources: less).

    The names determine the exact cuts, so that few blocks change if an item is added or removed. A
    size of 0 is unknown.
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


@dataclass(frozen=True)
class Plan:
    """Common data of all parts of a conversion."""

    made_from: dict[str, Any]  # settings and the source's fingerprint
    about: dict[str, Any]  # facts about the source for the description, such as its classes
    # of each block of the source. A block of the same number and key has the same bytes, whatever
    # else has changed in the source
    block_keys: list[str]
    version: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the source."""
        return len(self.block_keys)

    @property
    def key(self) -> str:
        """Hash that identifies this conversion."""
        return hashlib.sha256(self.as_json()).hexdigest()[:16]

    @property
    def format(self) -> str:
        """Format of the result: ``"mds"`` or ``"ffcv"``."""
        return str(self.made_from["settings"]["format"])

    @property
    def record_names(self) -> set[str]:
        """Names of the records of its blocks."""
        return {record_name(number, key) for number, key in enumerate(self.block_keys)}

    def continues(self, before: "Plan") -> bool:
        """Return whether this is the same conversion of a source that has changed since."""
        return (
            self.version == before.version
            and self.made_from["settings"] == before.made_from["settings"]
        )

    def as_json(self) -> bytes:
        """Return the text for ``records.parse``."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the setting, or else the source, in which two conversions differ; None: equal."""
    for key, value in now["settings"].items():
        old = before["settings"].get(key)
        if old != value:
            return f"made with {key}={old} instead of {value}"
    if before["source"] != now["source"]:
        return "made from other images or older versions of them"
    return None


def check_complete(records: Mapping[int, Record], plan: Plan, where: str) -> None:
    """Raise UserError if blocks are missing."""
    missing = set(range(plan.num_blocks)) - set(records)
    if not missing:
        return
    # parts are numbered like the existing ones
    total = max((record.num_shares for record in records.values()), default=1)
    blocks = [Block(number, 0, 0) for number in range(plan.num_blocks)]
    parts = [
        f"{number}/{total}"
        for number in range(1, total + 1)
        if missing.intersection(block.number for block in Share(number, total).of(blocks))
    ]
    raise UserError(
        f"{where} lacks part {', '.join(parts)} (blocks {ranges(missing)} of {plan.num_blocks}); "
        "write it, or copy it there, then merge."
    )


def check_samples(records: Sequence[Record], source: object) -> None:
    """Raise UserError if there is no sample."""
    if any(record.labels for record in records):
        return
    skipped = [item for record in records for item in record.skipped]
    raise UserError(
        f"{source}: none of the {len(skipped)} samples can be read ({skipped[0]['path']}: "
        f"{skipped[0]['reason']}); nothing was written."
    )


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers, counted from 1, in short form: ``1-3, 7``."""
    spans = spans_of(number + 1 for number in sorted(numbers))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
