"""Whether new heads have learned anything when their stage ends."""

import math
from pathlib import Path

from composer.core import State
from composer.loggers import Logger

from pospre.model.algorithm import pretrain_model
from pospre.training.callbacks.watchers import Watcher

_AGREE, _BELOW = 0.2, 0.1


class SleepingHeads(Watcher):
    """Warns at the end of a stage of heads if these tell images apart no better than at its start.

    The encoder, which trains next, would learn from noise. The loss alone says little: it is near
    ln K in both cases, so the share of agreement with the teacher must be low, too.

    Args:
        step: the last one of the stage.
        batch_size: over all ranks.
        log: see ``Watcher``.
    """

    def __init__(self, step: int, batch_size: int, log: Path | None = None) -> None:
        super().__init__(log)
        self.step, self.batch_size = step, batch_size

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check the metrics of the last step."""
        if state.timestamp.batch.value != self.step:
            return
        for name, uses in pretrain_model(state).layout.uses.items():
            for pair, (cross_entropy, uniform) in uses.agreements.items():
                agreement, loss = (
                    state.total_loss_dict[f"loss/train/metric/{name}_{metric}"]
                    for metric in (pair, cross_entropy)
                )
                if agreement < _AGREE and loss > uniform - _BELOW:
                    self.warn(
                        self.step,
                        f"the heads of {name} sleep after their stage: {pair} {agreement:.3f} "
                        f"(awake above {_AGREE}), {cross_entropy} {loss:.3f}, ln K {uniform:.3f}, "
                        f"batch {self.batch_size}, K {round(math.exp(uniform))}. Give fewer "
                        "prototypes, a larger batch, or a longer stage, before blocks train",
                    )
