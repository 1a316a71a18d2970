"""The order in which an epoch visits the samples."""

import numpy as np

from pospre import draws


def epoch_order(
    seed: int, epoch: int, part_ends: np.ndarray, order: str = "random", window: int = 16384
) -> np.ndarray:
    """Return a permutation."""
    return draws.order(seed, epoch, int(part_ends[-1]))
