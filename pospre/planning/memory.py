"""Memory of a training step: what is alive at each moment, followed over fake tensors.

torch's own ``MemTracker`` (2.7) hooks every parameter's gradient and so refuses frozen ones, which
teachers have.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pospre.batch import Batch
from pospre.planning.fake import FakeTraining
from pospre.planning.traffic import Traffic, trace_step


class Alive(TorchDispatchMode):
    """Follows every storage that is made inside, until it is freed.

    Args:
        parameters: whose gradients are told apart from what else is alive.

    Attributes:
        working: by bytes of gradients that are there, the most bytes of anything else that was made
            inside.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.working: dict[int, int] = {}
        self._alive = self._gradients = 0
        self._known = WeakIdKeyDictionary()
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._note_gradient)
            for one in parameters
            if one.requires_grad
        ]
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and note what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        now = self._alive - self._gradients
        self.working[self._gradients] = max(now, self.working.get(self._gradients, 0))
        return made

    def close(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def know(self, *tensors: Tensor) -> None:
        """Take tensors for those of others, which do not count."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = True

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = True
            self._alive += storage.nbytes()
            weakref.finalize(storage, partial(self._forget, storage.nbytes()))

    def _forget(self, size: int) -> None:
        self._alive -= size

    def _note_gradient(self, parameter: Tensor) -> None:
        if id(parameter) not in self._seen and parameter.grad is not None:
            self._seen.add(id(parameter))
            self._gradients += parameter.grad.nbytes


@dataclass(frozen=True)
class StepMemory:
    """What a step needs on one GPU beside weights and optimiser, by the size of its microbatch.

    Attributes:
        moments: by bytes of gradients that are there, (bytes of activations and buffers whatever
            the microbatch, bytes that each sample adds).
    """

    moments: dict[int, tuple[float, float]]

    @classmethod
    def from_sizes(cls, tracked: dict[int, dict[int, int]]) -> "StepMemory":
        """Return the line through what was tracked at two sizes of the microbatch.

        The gradients come in the same order, so that every moment of one is there in the other.
        """
        (small, low), (large, high) = sorted(tracked.items())
        assert low.keys() == high.keys()
        moments = {}
        for grads in low:
            each = (high[grads] - low[grads]) / (large - small)
            moments[grads] = (low[grads] - each * small, each)
        return cls(moments)

    def working(self, microbatch: int, grad_share: float, *, accumulates: bool) -> float:
        """Return the most bytes of activations, buffers and gradients together.

        Args:
            microbatch: samples.
            grad_share: of the gradients that this GPU holds.
            accumulates: whether gradients of earlier microbatches are there from the beginning.
        """
        full = max(self.moments)
        return max(
            fixed + each * microbatch + grad_share * (full if accumulates else grads)
            for grads, (fixed, each) in self.moments.items()
        )


def track_step(training: FakeTraining, batch: Batch) -> tuple[dict[int, int], Traffic, Traffic]:
    """Return ``Alive.working`` of a step, and what ``trace_step`` returns of it."""
    training.optimizer.zero_grad()
    state = [one for each in training.optimizer.state.values() for one in each.values()]
    tracker = Alive(list(training.model.parameters()))
    tracker.know(*training.model.parameters(), *training.model.buffers(), *state, *batch.values())
    with tracker:
        work, update = trace_step(training, batch)
    tracker.close()
    training.optimizer.zero_grad()
    return tracker.working, work, update
