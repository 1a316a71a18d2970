"""The gradient norm of every module, before clipping."""

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor

from pospre.training.callbacks.watcher import is_due
from pospre.training.optimizer.clipping import gradient_norm, with_gradients


class GradientNorms(Algorithm):
    """Logs ``gradient/encoder`` and ``gradient/<objective>`` at the steps that are logged.

    The encoder includes the modules that edit its tokens. This is an algorithm, because callbacks
    come after clipping. It follows the clipping in the list; Composer reverses the order once
    gradients are available, so it runs first. The host waits for the norms only when the losses
    are available, too.

    Args:
        interval: steps between checks.
    """

    def __init__(self, interval: int = 10) -> None:
        self.interval = interval
        self._norms: dict[str, Tensor] = {}

    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are available, and after the step."""
        step = state.timestamp.batch.value
        if event == Event.AFTER_TRAIN_BATCH:
            return is_due(step + 1, self.interval)
        return event == Event.BATCH_END and bool(self._norms)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Measure, then log."""
        if event == Event.AFTER_TRAIN_BATCH:
            groups = with_gradients(state, _owner)
            self._norms = {name: gradient_norm(found) for name, found in groups.items()}
            return
        values = torch.stack(list(self._norms.values())).tolist()
        names = [f"gradient/{name}" for name in self._norms]
        self._norms = {}
        logger.log_metrics(dict(zip(names, values, strict=True)))


def _owner(name: str) -> str:
    """Return ``encoder``, or the objective that owns a parameter."""
    return name.split(".")[2] if name.startswith("objectives.") else "encoder"
