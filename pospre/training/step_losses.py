"""The losses of a step: computed on the device, fetched once, when somebody looks at them."""

from collections.abc import Iterator, Mapping

import torch
from composer.utils import dist
from torch import Tensor


class StepLosses(Mapping[str, float]):
    """Losses and metrics by name. The first look waits until the device has computed them.

    Args:
        losses: of this rank, (1,) each; what is found is their mean over all ranks.
    """

    def __init__(self, losses: Mapping[str, Tensor]) -> None:
        self._names, values = list(losses), torch.cat(list(losses.values()))
        dist.all_reduce(values)
        # into pinned memory, beside the next step
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._found: dict[str, float] | None = None

    @property
    def is_late(self) -> bool:
        """Whether a look may wait, so that callbacks better look one step later."""
        return self._found is None and self._copied is not None

    def fetch(self) -> dict[str, float]:
        """Return all, once the device has computed them."""
        if self._found is None:
            if self._copied is not None:
                self._copied.synchronize()
            ranks, pairs = (
                dist.get_world_size(),
                zip(self._names, self._values.tolist(), strict=True),
            )
            self._found = {name: value / ranks for name, value in pairs}
        return self._found

    def __getitem__(self, name: str) -> float:
        """Return a loss."""
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, which wait for nothing."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of losses and metrics."""
        return len(self._names)


def is_late(losses: Mapping[str, float]) -> bool:
    """Tell whether to look at these losses now would wait for the device."""
    return isinstance(losses, StepLosses) and losses.is_late


def wait_for(losses: Mapping[str, float]) -> None:
    """Wait until the device has computed these losses."""
    if isinstance(losses, StepLosses):
        losses.fetch()
