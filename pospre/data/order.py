"""The order of samples in an epoch: a pure function of seed, epoch and data set.

``"random"`` is a permutation of the whole data set. Any sample may come at any time, so all of it
should be available locally.

``"windows"`` is for data that come in parts (shards fetched whole) and do not all fit locally. The
parts are put in random order, one after another; then samples are shuffled within consecutive
windows of this sequence. Thus

- a sample is visited less than ``window`` visits from its part's position in the sequence;
- the samples of a window come only from the parts within it: with parts of at most p samples, at
  most (window − 2) // p + 2, and one more if a shorter part is in between (a window of the data
  set's size is the order ``"random"``);
- a part is needed from its first window to its last. It is fetched once per epoch if the cache
  holds the parts of two windows, that of the last and of the next batch.

Shard groups are for several machines with their own caches; with one group all machines need the
same parts at the same time. The parts are put in an order drawn from the seed, the same for all
epochs. This sequence is cut into G groups with equal numbers of samples (so up to G − 1 parts are
cut in two). Within each group an epoch proceeds as above, with windows of ``window`` / G. Visit i
of the epoch is visit i // G of group i % G: every batch has the same number of samples from each
group, in order of groups. A rank has a fixed range of every batch's rows, so it visits few groups,
the same in every epoch. K machines visit G / K groups each if K divides G, and the batches are the
same for every K.

Groups never change, so from the second epoch on a machine finds its own in its cache. Samples of
any two parts can still meet, because every batch has samples of all groups.
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
    """Return the samples in the order visited by all ranks together, int64 (N,).

    ``part_ends`` are the ends of the data set's parts, int64, ascending; the last is N. ``window``
    is the number of samples shuffled together over all groups.
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
        slots = samples[group::groups]
        own = sequence[start : start + len(slots)]
        slots[:] = _shuffle_windows(seed, epoch, own, window)
        start += len(slots)
    return samples


def rank_visits(
    count: int, rank: int, world_size: int, batch_size: int, groups: int = 1
) -> np.ndarray:
    """Return a rank's visits among ``count`` consecutive ones, batch by batch: int64.

    These are whole batches of all ranks; with one rank the last batch may be short.
    """
    global_size = world_size * batch_size
    whole = count - count % global_size
    rows = batch_rows(global_size, groups)[rank * batch_size : (rank + 1) * batch_size]
    own = (np.arange(0, whole, global_size)[:, None] + rows).reshape(-1)
    return np.concatenate([own, whole + batch_rows(count - whole, groups)])


def batch_rows(size: int, groups: int) -> np.ndarray:
    """Return the visit in each row of a batch, int64 (size,); rows are ordered by group."""
    return np.argsort(np.arange(size) % groups, kind="stable")


class Runs(NamedTuple):
    """Consecutive samples of a part in one group; arrays int64 (runs,), ordered by group."""

    group: np.ndarray
    part: np.ndarray
    first: np.ndarray
    size: np.ndarray


def deal(seed: int, part_ends: np.ndarray, groups: int) -> Runs:
    """Deal the parts of a data set to groups whose sizes differ by at most one sample."""
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
    runs = np.searchsorted(ends, starts, side="right")
    dealt = parts[runs]
    return Runs(
        group=np.searchsorted(group_ends, starts, side="right"),
        part=dealt,
        first=part_ends[dealt] - ends[runs] + starts,
        size=cuts - starts,
    )


def groups_of(number: int, count: int, groups: int) -> range:
    """Return the groups in the equal share ``number`` of ``count`` of every batch."""
    return range(number * groups // count, -(-(number + 1) * groups // count))


def _shuffle_runs(seed: int, epoch: int, runs: Runs) -> np.ndarray:
    """Return the samples of all runs in stored order, with the runs of each group shuffled."""
    keys = draws.sample_keys(seed, epoch, runs.part, 0, "shuffle/parts")
    shuffled = np.lexsort((keys, runs.group))
    sizes = runs.size[shuffled]
    sequence = np.repeat(runs.first[shuffled] - np.cumsum(sizes) + sizes, sizes)
    sequence += np.arange(len(sequence))
    return sequence


def _shuffle_windows(seed: int, epoch: int, sequence: np.ndarray, window: int) -> np.ndarray:
    """Sort the samples of each window, in place, by the keys of the order ``"random"``."""
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
