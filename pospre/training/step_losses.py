"""The losses of a step: computed on the device, fetched once, on first access."""

from collections.abc import Iterator, Mapping

import torch
from composer.utils import dist
from torch import Tensor


class StepLosses(Mapping[str, float]):
    """Losses and metrics by name. The first access waits until the device has computed them.

    Args:
        losses: of this rank, a number each; the values are their means over all ranks.
    """

    def __init__(self, losses: Mapping[str, Tensor]) -> None:
        self._names = list(losses)
        values = torch.cat([loss.reshape(1) for loss in losses.values()])
        dist.all_reduce(values)
        # into pinned memory, during the next step
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._found: dict[str, float] | None = None

    @property
    def is_late(self) -> bool:
        """Whether access may wait, so that callbacks should read them one step later."""
        return self._found is None and self._copied is not None

    def fetch(self) -> dict[str, float]:
        """Return all values, once the device has computed them."""
        if self._found is None:
            if self._copied is not None:
                self._copied.synchronize()
            ranks, values = dist.get_world_size(), self._values.tolist()
            pairs = zip(self._names, values, strict=True)
            self._found = {name: value / ranks for name, value in pairs}
        return self._found

    def __getitem__(self, name: str) -> float:
        """Return a loss."""
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, without waiting."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of losses and metrics."""
        return len(self._names)


def is_late(losses: Mapping[str, float]) -> bool:
    """Return whether access to these losses would wait for the device."""
    return isinstance(losses, StepLosses) and losses.is_late


def wait_for(losses: Mapping[str, float]) -> None:
    """Wait until the device has computed these losses."""
    if isinstance(losses, StepLosses):
        losses.fetch()
