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
    """Access to a data set, and the meaning of its values.

    Args:
        cache_dir: folder for downloaded shards; default: ``$POSPRE_CACHE`` or
            ``pospre`` in ``$XDG_CACHE_HOME`` (``~/.cache``). Every remote data set gets its own
            sub-folder.
        cache_limit: maximal bytes of a remote data set's shards on this machine, or a text such as
            200GB; None: no limit.
        deep_range: ``(LOW, HIGH)``: values that become 0 and 255 in images of more than 8 bits;
            ``auto``: see ``pospre.data.decode.bit_depth``.
    """

    cache_dir: str | Path | None = None
    cache_limit: Bytes | None = None
    deep_range: Literal["auto"] | RisingRange = "auto"


@dataclass(kw_only=True)
class Reading(Storage):
    """Choice, order and decoding of samples.

    Args:
        label_fraction: share of images to use, the same number per class, drawn by the seed; an
            epoch has only these.
        labels: text file that lists the images to use instead, one per line.
        num_workers: decoding threads; default: one per core available to this rank; 0: decode in
            the calling thread.
        repeats: how many times in a row each sample comes, in an epoch of the same length.
        order: order of a shuffled epoch: ``random``, or ``windows`` for data that come in parts,
            such as s3:// shards; see ``pospre.data.order``.
        window: number of samples shuffled together in windows.
        shard_groups: number of groups of shards, so that machines with their own caches need not
            download everything; it divides the batch of all ranks; see ``pospre.data.order``.
        bad_samples: ``fail`` stops at a sample that cannot be decoded and names it; ``skip`` warns,
            counts it and takes the next one instead.
        tolerance: allowed difference of views from the same boxes of the full-size image, RMS in
            grey levels of 255, on average over photographs. Large JPEGs are then decoded at lower
            resolution; below 0.75 none are.
    """

    label_fraction: PositiveShare = 1.0
    labels: str | None = None
    num_workers: NonNegativeInt | None = None
    repeats: PositiveInt = 1
    order: Literal["random", "windows"] = "random"
    window: PositiveInt = 16384
    shard_groups: PositiveInt = 1
    bad_samples: Literal["fail", "skip"] = "fail"
    tolerance: NonNegativeFloat = 1.0
