"""How samples are read and in which order: the options that loaders share with recipes.

They need neither numpy nor PyTorch, so that recipes are read at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from pospre.ranges import Bytes, PositiveShare, RisingRange


@dataclass(kw_only=True)
class Storage:
    """How a data set is reached, and what its values mean.

    Args:
        cache_dir: folder for downloaded shards, by default ``$POSPRE_CACHE`` or
            ``~/.cache/pospre``; every remote data set has a folder of its own in there.
        cache_limit: bytes that the shards of a remote data set may take on this machine, or a text
            such as 200GB; None: no limit.
        deep_range: ``(LOW, HIGH)``: values that become 0 and 255 in images of more than 8 bits;
            ``auto``: see ``pospre.data.decode.bit_depth``.
    """

    cache_dir: str | Path | None = None
    cache_limit: Bytes | None = None
    deep_range: Literal["auto"] | RisingRange = "auto"


@dataclass(kw_only=True)
class Reading(Storage):
    """Which samples are read, in which order and by how many threads.

    Args:
        label_fraction: of the images, as many of each class, drawn by the seed; an epoch is what is
            left.
        labels: text file that names the images to take instead, one in each line.
        num_workers: decoding threads; by default one per core that this rank may use; 0: images
            are decoded where they are asked for.
        repeats: how many times in a row each sample comes, in an epoch of the same length.
        order: of a shuffled epoch: ``random``, or ``windows`` for data that come in parts, such as
            s3:// shards; see ``pospre.data.order``.
        window: samples that are shuffled together in windows.
        shard_groups: number of groups that the shards are dealt to, so that machines with caches of
            their own need not download everything; it divides the batch of all ranks; see
            ``pospre.data.order``.
        bad_samples: ``fail`` stops at a sample that cannot be decoded and names it; ``skip`` warns,
            counts it and takes the next one in its place.
        tolerance: how much views may differ from the same boxes of the full-size image, RMS in
            grey levels of 255 and on average over photographs, so that large JPEGs may be decoded
            smaller; below 0.75 none are.
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
