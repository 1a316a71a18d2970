"""What is about to be written, copied: training goes on while the copy is written."""

import copy
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Copies states into the CPU's memory: in the same buffers each time, pinned beside a GPU.

    What an earlier call returned is overwritten by the next one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of nested dicts, lists and tuples with everything in them."""
        used: dict[str, Tensor] = {}
        staged: dict[str, Any] = self._copy(state, "", used)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies from the GPU are under way
        self._buffers = used
        return staged

    def _copy(self, value: Any, place: str, used: dict[str, Tensor]) -> Any:
        if isinstance(value, Tensor):
            used[place] = self._buffer(place, value).copy_(value, non_blocking=True)
            return used[place]
        if isinstance(value, dict):
            return {key: self._copy(item, f"{place}/{key}", used) for key, item in value.items()}
        if type(value) in (list, tuple):
            copies = (self._copy(item, f"{place}/{i}", used) for i, item in enumerate(value))
            return type(value)(copies)
        return copy.deepcopy(value)

    def _buffer(self, place: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return buffer
