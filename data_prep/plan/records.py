"""The settings of a conversion, the record of each converted block, and their sums."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from pospre.data.decode.bit_depth import Decoding, parse_range
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

T = TypeVar("T")

RECORD = re.compile(r"[0-9a-f]{16}\.\d{5}\.json")
"""Names of the records of blocks."""


@dataclass(frozen=True)
class Settings:
    """Everything besides the source that determines the bytes of the result."""

    format: str
    max_side: int | None = None
    quality: int = 90
    split: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    frames: int | None = None  # of a clip; None for images
    source: str = "auto"
    check: str = "full"
    shard_mb: float | None = None
    seekable: bool = False
    keywords: str | None = None  # comma-separated
    channels: int = 3
    deep_range: str = "auto"

    @property
    def columns(self) -> dict[str, str]:
        """Encoding of a sample's data in MDS shards, by column."""
        if self.frames is None:
            return {"image": "bytes"}
        from data_prep.encode.clips import NUM_COEFFICIENTS  # scipy: slow to import

        return {"features": f"ndarray:float32:{self.frames},{NUM_COEFFICIENTS}"}

    @property
    def decoding(self) -> Decoding:
        """How images are decoded."""
        return Decoding(self.channels, parse_range(self.deep_range, "--deep-range"))


@dataclass
class Record:
    """A converted block: its files and samples."""

    number: int
    key: str  # of everything that determines the block's bytes
    num_shares: int = 1  # of the conversion when the block was converted
    shards: list[dict[str, Any]] = field(default_factory=list)  # their entries of index.json
    num_visible: int = 0  # number of images whose bytes were kept
    # number of images whose pixels were kept, with restart markers added; all others were encoded
    # again
    num_marked: int = 0
    # path and reason of unreadable files
    skipped: list[dict[str, str]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # of every sample written
    num_bytes: list[int] = field(default_factory=list)  # of the image (or features) of every sample
    # the checksum of these bytes and the label, of every sample
    crc32c: list[int] = field(default_factory=list)
    # width and height of every image; empty for clips
    sides: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # length of every clip; empty for images
    # of the features of clips, or the pixels of other than three channels: see Moments
    sums: list[list[float]] | None = None
    # for images of more than 8 bits: index of the sample in the block, the values that became 0
    # to 255, whether they are a guess, and whether the image is now nearly one grey
    deep: list[tuple[int, str, bool, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.labels) == len(self.num_bytes) == len(self.crc32c):
            raise ValueError("as many labels as samples and checksums")

    @property
    def name(self) -> str:
        """Name of its file; other blocks, and those of other conversions, have other names."""
        return record_name(self.number, self.key)

    @property
    def files(self) -> list[tuple[str, int, str]]:
        """Name, bytes and SHA-256 of each shard."""
        data = [shard["raw_data"] for shard in self.shards]
        return [(each["basename"], each["bytes"], each["hashes"]["sha256"]) for each in data]

    def as_json(self) -> bytes:
        """Return the text for ``parse``."""
        return json.dumps(vars(self), separators=(",", ":")).encode()


def record_name(number: int, key: str) -> str:
    """Return the name of the record of a block."""
    return f"{key}.{number:05d}.json"


def parse(kind: type[T], text: bytes, where: str) -> T:
    """Parse a record or a plan of another run; ``UserError`` if it is damaged."""
    try:
        return kind(**parse_object(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} is damaged; remove it and convert again.") from error


def spans_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and last number of each run of consecutive numbers, in order."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


@dataclass
class Summary:
    """The results of a conversion, or of a part of one."""

    records: Sequence[Record]  # of its blocks, in order
    description: Mapping[str, Any]  # as ``publish.description.describe`` returns it
    num_reused: int = 0  # number of blocks that an earlier run had finished
    seconds: float = 0.0  # duration of this run


class Moments:
    """Mean and standard deviation of each of ``num_columns`` columns of many rows of numbers."""

    def __init__(self, num_columns: int) -> None:
        self._count = 0
        self._sum = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)

    def add(self, rows: np.ndarray) -> None:
        """Add rows, (n, columns)."""
        deep = rows.astype(np.float64)
        self._count += len(deep)
        self._sum += deep.sum(axis=0)
        self._squares += np.square(deep).sum(axis=0)

    def sums(self) -> list[list[float]]:
        """Return sums for ``add_sums``: a data set's rows may be counted in parts."""
        return [[self._count], self._sum.tolist(), self._squares.tolist()]

    def add_sums(self, sums: list[list[float]]) -> None:
        """Add rows counted elsewhere."""
        self._count += int(sums[0][0])
        self._sum += sums[1]
        self._squares += sums[2]

    def describe(self) -> dict[str, list[float]]:
        """Return ``mean`` and ``std``; constant columns have the std 1."""
        mean = self._sum / max(self._count, 1)
        std = np.sqrt(np.maximum(self._squares / max(self._count, 1) - np.square(mean), 0.0))
        std = np.where(std > 1e-6, std, 1.0)
        return {"mean": [round(v, 6) for v in mean.tolist()],
                "std": [round(v, 6) for v in std.tolist()]}  # fmt: skip
