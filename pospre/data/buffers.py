"""Reuses the memory of batches that nobody holds any more for the next batches.

Left to the C library, each batch takes fresh memory of the system's, page by page, or leaves gaps
that the next one does not fit into: a loader then keeps several times what its batches need.
"""

import weakref
from collections import defaultdict, deque
from functools import partial

import numpy as np
import torch
from torch import Tensor


class BatchMemory:
    """Gives memory out, and takes it back by itself when the last tensor in it is gone.

    What is kept stays as long as this object: given back to the system between epochs, it would
    leave the same gaps.

    Args:
        most_kept: pieces of each size that are kept for later; others go back to the system.
    """

    def __init__(self, most_kept: int) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(partial(deque, (), most_kept))
        self._lent: list[weakref.ref[np.ndarray]] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return memory, uint8 (num_bytes,), with whatever it holds.

        It is in use as long as this tensor or another that shares its storage is.
        """
        free = self._free[num_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        lent = memory[:]
        # A Ctrl-C that comes while a callback runs Python code is swallowed; this one runs none.
        # It is called with the dead reference, which ``next`` takes for its default.
        give_back = partial(next, map(free.append, (memory,)))
        self._lent = [reference for reference in self._lent if reference() is not None]
        self._lent.append(weakref.ref(lent, give_back))
        return torch.from_numpy(lent)  # keeps the array until the storage is gone
