"""Options of reading, shared by loaders and recipes.

This module imports neither numpy nor PyTorch, so that recipes are read quickly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from pospre.ranges import Bytes, PositiveShare, RisingRange


@dataclass(kw_only=True)
class Storage:
    """Access to a data set, and the meaning of its values."""

    cache_dir: str | Path | None = None
    """Folder for downloaded shards; default: ``$POSPRE_CACHE`` or ``pospre`` in ``$XDG_CACHE_HOME``
    (``~/.cache``). Every remote data set gets its own sub-folder.
    """
    cache_limit: Bytes | None = None
    """Maximal bytes of a remote data set's shards on this machine, or a text: 200GB; None: all."""
    deep_range: Literal["auto"] | RisingRange = "auto"
    """(LOW, HIGH): values that become 0 and 255 in images of more than 8 bits; ``auto``: see
    ``pospre.data.decode.bit_depth``.
    """


@dataclass(kw_only=True)
class Reading(Storage):
    """Choice, order and decoding of samples."""

    label_fraction: PositiveShare = 1.0
    """Share of images that an epoch has, the same number per class, drawn by the seed."""
    labels: str | None = None
    """Text file that lists the images to use instead, one per line."""
    num_workers: NonNegativeInt | None = None
    """Decoding threads; default: one per core of this rank; 0: decode in the calling thread."""
    repeats: PositiveInt = 1
    """How many times in a row each sample comes, in an epoch of the same length."""
    order: Literal["random", "windows"] = "random"
    """Order of a shuffled epoch: ``random``, or ``windows`` for data that come in parts, such as
    s3:// shards; see ``pospre.data.order``.
    """
    window: PositiveInt = 16384
    """Number of samples shuffled together in windows."""
    shard_groups: PositiveInt = 1
    """Number of groups of shards, so that machines with their own caches need not download
    everything; it divides the batch of all ranks; see ``pospre.data.order``.
    """
    bad_samples: Literal["fail", "skip"] = "fail"
    """``fail`` names a sample that cannot be decoded and stops; ``skip`` warns and takes the next.
    """
    tolerance: NonNegativeFloat = 1.0
    """Allowed difference of views from the same boxes of the full-size image, RMS in grey levels of
    255, on average over photographs. Large JPEGs are then decoded at lower resolution; below 0.75
    none are.
    """
