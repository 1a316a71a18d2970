"""Estimate of the memory for loading, compared with the available memory before the start."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pospre.data.loader import ViewLoader
from pospre.data.stores.reader import Reader
from pospre.errors import UserError

BYTES_OF_CODE = 48 << 20  # libraries and compiled functions that the first batch loads

_ASSUMED_PIXELS = 4_000_000  # of the largest image, if the reader does not know
# Measured (tests/data/test_memory.py): decoded pixels, their cut-out and what resizing needs.
_BYTES_PER_PIXEL = 8
_BYTES_PER_THREAD = 16 << 20  # samples read together, and the allocator's reserve for each
_BYTES_PER_SAMPLE = 120  # offsets, labels, names and the epoch's order
_LOOKED_AT = 64  # files whose sizes represent all
_NO_LIMIT = 1 << 60  # cgroup v1's value for no limit
# where the two cgroup versions keep limit and usage, and a prefix of their counters
_GROUPS = ("", "memory.max", "memory.current", "")
_OLD_GROUPS = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a machine's loaders need, and the available memory; all in bytes.

    Attributes:
        batches: batches in preparation and in use, per rank.
        decoding: working memory of the decoding threads, and their code, per rank.
        tables: offsets and order of the samples, per rank.
        stored: the data set; None if unknown or not on this machine.
        available: memory of this machine, or of its container; None if unknown.
    """

    batches: int
    decoding: int
    tables: int
    num_ranks: int
    stored: int | None
    available: int | None

    @property
    def per_rank(self) -> int:
        """Bytes of one rank's loader."""
        return self.batches + self.decoding + self.tables

    @property
    def total(self) -> int:
        """Bytes of all loaders on this machine."""
        return self.per_rank * self.num_ranks

    def check(self) -> None:
        """Warn if every epoch would read the whole data set from disk.

        Raises:
            UserError: the loaders alone need more memory than available.
        """
        if self.available is None:
            return
        if self.total > self.available:
            raise UserError(
                f"loading needs about {readable(self.total)} of memory on this machine "
                f"({self.num_ranks} x {readable(self.per_rank)}: batches {readable(self.batches)}, "
                f"decoding {readable(self.decoding)}, tables {readable(self.tables)}), but "
                f"{readable(self.available)} are available. Lower data.batch_size or "
                "data.num_workers, or give the machine or its container more memory."
            )
        if self.stored is not None and self.stored > self.available - self.total:
            warnings.warn(
                f"The data set has about {readable(self.stored)}, but only "
                f"{readable(self.available - self.total)} of memory are left to cache it: every "
                "epoch will read from disk.",
                stacklevel=2,
            )


def estimate_memory(loader: ViewLoader) -> MemoryEstimate:
    """Estimate the memory of a loader, and of equal loaders on this machine's other ranks."""
    reader = loader.reader
    channels = reader.decoding.channels
    numbers = channels if reader.features is None else 4  # bytes per pixel
    views = sum(group.count * (np.prod(group.shape) * numbers + 17) for group in loader.groups)
    pixels = _ASSUMED_PIXELS if reader.max_pixels is None else reader.max_pixels
    pixels = pixels if reader.features is None else 0
    per_pixel = -(-_BYTES_PER_PIXEL * max(3, channels) // 3)  # one channel is made from three
    return MemoryEstimate(
        batches=int((views + 24) * loader.batch_size * loader.num_batches_held),
        decoding=BYTES_OF_CODE + max(1, loader.threads) * (per_pixel * pixels + _BYTES_PER_THREAD),
        tables=_BYTES_PER_SAMPLE * len(reader),
        num_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        stored=stored_bytes(reader),
        available=available_memory(),
    )


def stored_bytes(reader: Reader) -> int | None:
    """Return the size of a data set, for folders an estimate; None if not on this machine."""
    if reader.format != "folder":
        return reader.num_bytes
    some = np.linspace(0, len(reader) - 1, min(_LOOKED_AT, len(reader))).astype(int).tolist()
    try:
        sizes = [os.stat(reader.name(index)).st_size for index in some]
    except OSError:  # a file is missing: reading it will raise the error
        return None
    return int(np.mean(sizes) * len(reader))


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the free bytes of this machine or container; ``root`` holds ``proc`` and ``sys``."""
    known = _group_memory(root)
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            known.append(int(line.split()[1]) << 10)
    return min(known, default=None)


def _group_memory(root: Path) -> list[int]:
    """Return the available bytes of each control group with a limit around this process."""
    rooms = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_file, usage_file, prefix = _OLD_GROUPS if controllers else _GROUPS
        base = root / "sys/fs/cgroup" / mount
        inner = base / path.lstrip("/")
        # in a container the path may be the outer one, with its own group at the root
        for folder in (inner, *(some for some in inner.parents if some.is_relative_to(base))):
            limit, usage = _lines(folder / limit_file), _lines(folder / usage_file)
            if limit and usage and limit[0] != "max" and int(limit[0]) < _NO_LIMIT:
                counters = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
                files = (counters.get(f"{prefix}{age}_file", 0) for age in ("active", "inactive"))
                # cached files can be dropped
                rooms.append(max(0, int(limit[0]) - int(usage[0]) + sum(map(int, files))))
    return rooms


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or no such control group
        return []


def readable(size: int) -> str:
    """Return a readable size: ``"1.3 GiB"``."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"
