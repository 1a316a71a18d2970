"""The operators that run, by name."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperators(TorchDispatchMode):
    """Counts each operator that runs inside of it, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count it."""
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def total(self) -> int:
        """Return how many ran."""
        return self.counts.total()
