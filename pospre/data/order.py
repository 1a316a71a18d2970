"""The order in which an epoch visits the samples: a pure function of seed, epoch and data set.

``"random"`` is a permutation of the whole data set: every sample may come at any time, so all of it
should be at hand.

``"windows"`` is for data that come in parts (shards fetched whole) and do not all fit at hand. The
parts come in a random order, one after another; then the samples are shuffled inside consecutive
windows of that sequence. So

- a sample is visited less than ``window`` visits from where its part lies in the sequence;
- the samples of a window come from the parts that lie in it and no others: with parts of p samples
  at most (window − 2) // p + 2, and one more where a shorter part lies between (a window as large
  as the data set is the order ``"random"``);
- a part is needed from its first window to its last. It is fetched once in an epoch as long as the
  cache holds the parts of two windows, that of the last and of the next batch.

Shard groups are for several machines, each with a cache of its own; with one group all machines
need the same parts at the same time. The parts are dealt to G groups once, for all epochs: they are
put into an order drawn from the seed, and this sequence is cut into G groups of equally many
samples (so up to G − 1 parts are cut in two). Within each group an epoch goes as above, in windows
of ``window`` / G. Visit i of the epoch is visit i // G of group i % G: every batch takes equally
many samples of each group, and lists them group by group. A rank has a fixed range of every batch's
rows, so it visits few groups, the same in every epoch. K machines visit G / K groups each if K
divides G, and the batches are the same for every K.

The groups stay the same, so a machine finds its own in its cache from the second epoch on. Samples
of any two parts can still meet, since every batch holds samples of all groups.
"""

from typing import NamedTuple

import numpy as np

from pospre import draws

_BLOCK = 1 << 18  # samples at a time: few calls, little memory


def epoch_order(
    seed: int,
    epoch: int,
    part_ends: np.ndarray,
    order: str = "random",
    window: int = 16384,
    groups: int = 1,
) -> np.ndarray:
    """Return the samples in the order in which all ranks together visit them, int64 (N,).

    Args:
        seed: the run's seed.
        epoch: number of the epoch.
        part_ends: where each part of the data set ends, int64, ascending; the last is N.
        order: ``"random"`` or ``"windows"``.
        window: samples that are shuffled together in windows, those of all groups.
        groups: that the parts are dealt to.
    """
    num_samples = int(part_ends[-1])
    if order == "random" and groups == 1:
        return draws.order(seed, epoch, num_samples)
    runs = deal(seed, part_ends, groups)
    sequence = _shuffle_runs(seed, epoch, runs)
    window = window // groups if order == "windows" else num_samples
    samples = np.empty_like(sequence)
    start = 0
    for group in range(groups):
        places = samples[group::groups]
        own = sequence[start : start + len(places)]
        places[:] = _shuffle_windows(seed, epoch, own, window)
        start += len(places)
    return samples


def rank_visits(
    count: int, rank: int, world_size: int, batch_size: int, groups: int = 1
) -> np.ndarray:
    """Return those of ``count`` consecutive visits that a rank makes, batch by batch: int64.

    Args:
        count: visits of whole batches of all ranks; of one rank the last batch may be short.
        rank: number of the rank.
        world_size: number of ranks.
        batch_size: samples per batch of one rank.
        groups: that the parts are dealt to.
    """
    global_size = world_size * batch_size
    whole = count - count % global_size
    rows = batch_rows(global_size, groups)[rank * batch_size : (rank + 1) * batch_size]
    own = (np.arange(0, whole, global_size)[:, None] + rows).reshape(-1)
    return np.concatenate([own, whole + batch_rows(count - whole, groups)])


def batch_rows(size: int, groups: int) -> np.ndarray:
    """Return the visit that each row of a batch holds, int64 (size,); rows go group by group."""
    return np.argsort(np.arange(size) % groups, kind="stable")


class Runs(NamedTuple):
    """Consecutive samples of a part that lie in one group; arrays int64 (runs,), group after group.

    Attributes:
        group: where each lies.
        part: that it is of.
        first: its first sample.
        size: how many samples it has.
    """

    group: np.ndarray
    part: np.ndarray
    first: np.ndarray
    size: np.ndarray


def deal(seed: int, part_ends: np.ndarray, groups: int) -> Runs:
    """Deal the parts of a data set to groups that differ by a sample at most."""
    sizes = np.diff(part_ends, prepend=0)
    parts = np.arange(len(sizes), dtype=np.int64)
    if groups > 1:
        parts = np.argsort(draws.sample_keys(seed, 0, parts, 0, "shuffle/lanes"))
    ends = np.cumsum(sizes[parts])
    group_sizes = [len(range(group, int(ends[-1]), groups)) for group in range(groups)]
    group_ends = np.cumsum(np.array(group_sizes, dtype=np.int64))
    cuts = np.union1d(ends, group_ends)
    cuts = cuts[cuts > 0]
    starts = np.concatenate([[0], cuts[:-1]])
    places = np.searchsorted(ends, starts, side="right")
    dealt = parts[places]
    return Runs(
        group=np.searchsorted(group_ends, starts, side="right"),
        part=dealt,
        first=part_ends[dealt] - ends[places] + starts,
        size=cuts - starts,
    )


def groups_of(number: int, count: int, groups: int) -> range:
    """Return the groups that equal share ``number`` of ``count`` of every batch comes from."""
    return range(number * groups // count, -(-(number + 1) * groups // count))


def _shuffle_runs(seed: int, epoch: int, runs: Runs) -> np.ndarray:
    """Return the samples of all runs in their own order, the runs of each group in a random one."""
    keys = draws.sample_keys(seed, epoch, runs.part, 0, "shuffle/parts")
    shuffled = np.lexsort((keys, runs.group))
    sizes = runs.size[shuffled]
    sequence = np.repeat(runs.first[shuffled] - np.cumsum(sizes) + sizes, sizes)
    sequence += np.arange(len(sequence))
    return sequence


def _shuffle_windows(seed: int, epoch: int, sequence: np.ndarray, window: int) -> np.ndarray:
    """Sort the samples of each window, in place, by the keys that the order ``"random"`` has."""
    size = len(sequence)
    whole = size - size % window
    block = max(1, _BLOCK // window) * window
    for start in range(0, whole, block):
        _sort_rows(seed, epoch, sequence[start : min(start + block, whole)].reshape(-1, window))
    _sort_rows(seed, epoch, sequence[None, whole:])
    return sequence


def _sort_rows(seed: int, epoch: int, rows: np.ndarray) -> None:
    keys = draws.sample_keys(seed, epoch, rows, 0, "shuffle")
    rows[:] = np.take_along_axis(rows, np.argsort(keys, axis=1), axis=1)
