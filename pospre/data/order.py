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

Ranks share every batch, so every machine needs the same parts at the same time.
"""

import numpy as np

from pospre import draws
from pospre.errors import UserError, suggestion

ORDERS = ("random", "windows")
_BLOCK = 1 << 18  # samples at a time: few calls, little memory


def epoch_order(
    seed: int, epoch: int, part_ends: np.ndarray, order: str = "random", window: int = 16384
) -> np.ndarray:
    """Return the samples in the order in which all ranks together visit them, int64 (N,).

    Args:
        seed: the run's seed.
        epoch: number of the epoch.
        part_ends: where each part of the data set ends, int64, ascending; the last is N.
        order: ``"random"`` or ``"windows"``.
        window: samples that are shuffled together in windows.

    Raises:
        UserError: the order is unknown or the window is empty.
    """
    check_order(order, window)
    if order == "random":
        return draws.order(seed, epoch, int(part_ends[-1]))
    return _shuffle_windows(seed, epoch, _shuffle_parts(seed, epoch, part_ends), window)


def rank_samples(samples: np.ndarray, rank: int, world_size: int, batch_size: int) -> np.ndarray:
    """Return those of an epoch's samples that a rank gets, in order: int64.

    Args:
        samples: whole batches of all ranks, one after the other; of one rank the last may be short.
        rank: number of the rank.
        world_size: number of ranks.
        batch_size: samples per batch of one rank.
    """
    if world_size == 1:
        return samples
    num_batches = len(samples) // (world_size * batch_size)
    return samples.reshape(num_batches, world_size, batch_size)[:, rank].reshape(-1)


def check_order(order: str, window: int) -> None:
    """Raise a UserError where there is no such order or window."""
    if order not in ORDERS:
        raise UserError(f"order '{order}' is unknown.{suggestion(order, ORDERS)}")
    if window < 1:
        raise UserError(f"window is {window}; it counts samples that are shuffled together, 1 up.")


def _shuffle_parts(seed: int, epoch: int, part_ends: np.ndarray) -> np.ndarray:
    """Return the samples of all parts, in their own order, the parts in a random one."""
    sizes = np.diff(part_ends, prepend=0)
    numbers = np.arange(len(sizes), dtype=np.int64)
    parts = np.argsort(draws.sample_keys(seed, epoch, numbers, 0, "shuffle/parts"))
    ends = np.cumsum(sizes[parts])
    sequence = np.repeat(part_ends[parts] - ends, sizes[parts])
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
