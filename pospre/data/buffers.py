"""Reuses the memory of batches that are no longer referenced.

With the C library's allocator, each batch takes new memory from the system, or leaves gaps that are
too small for the next. A loader would then keep several times the memory that it needs.
"""

import weakref
from collections import defaultdict, deque
from functools import partial

import numpy as np
import torch
from torch import Tensor


class BatchMemory:
    """Lends memory, and recycles it when the last tensor in it is deleted.

    At most ``most_kept`` pieces of each size are kept, for this object's lifetime: returning them
    to the system between epochs would leave the same gaps.
    """

    def __init__(self, most_kept: int) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(partial(deque, (), most_kept))
        self._lent: list[weakref.ref[np.ndarray]] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uninitialised memory, uint8 (num_bytes,).

        It is in use as long as this tensor, or another one on its storage, exists.
        """
        free = self._free[num_bytes]
        try:
            memory = free.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        lent = memory[:]
        # A Ctrl-C during Python code in a callback would be swallowed; this callback runs none. It
        # is called with the dead reference, which ``next`` takes as its default.
        give_back = partial(next, map(free.append, (memory,)))
        self._lent = [reference for reference in self._lent if reference() is not None]
        self._lent.append(weakref.ref(lent, give_back))
        return torch.from_numpy(lent)  # keeps the array until the storage is deleted
