"""Base of callbacks that check every step: on a GPU they do so during the next step."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from composer.core import Callback, State
from composer.loggers import Logger

from pospre.batch import EPOCH, INDEX
from pospre.training.step_losses import is_late


class DoneStep(NamedTuple):
    """A finished step.

    Attributes:
        number: counted from 1.
        losses: and metrics, by Composer's names.
        samples: ``index`` and ``epoch`` of its batch, if it has them.
    """

    number: int
    losses: Mapping[str, float]
    samples: dict[str, Any]


def done_step(state: State) -> DoneStep:
    """Return the step just finished."""
    batch = state.batch if isinstance(state.batch, Mapping) else {}
    samples = {key: batch[key] for key in (INDEX, EPOCH) if key in batch}
    return DoneStep(state.timestamp.batch.value, state.total_loss_dict, samples)


class EachStep(Callback):
    """Checks every step, at most one step late, so that the host need not wait for a GPU.

    It checks immediately before a checkpoint (``before_save``), at the end of an epoch and of
    training, and if the losses are available: on a CPU, or under Composer's own Trainer.
    """

    _unjudged: DoneStep | None = None

    @abstractmethod
    def judge_step(self, state: State, step: DoneStep) -> None:
        """Check a step; all ranks do it at the same time, with the same losses."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Check the previous step, and this one unless its losses are still being computed."""
        self.settle(state)
        self._unjudged = done_step(state)
        if not is_late(state.total_loss_dict):
            self.settle(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Check the last step of the epoch."""
        self.settle(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Check the last step."""
        self.settle(state)

    def before_save(self, state: State) -> None:
        """Check the step that is about to be saved."""
        self.settle(state)

    def settle(self, state: State) -> None:
        """Check any step not checked yet."""
        step, self._unjudged = self._unjudged, None
        if step is not None:
            self.judge_step(state, step)
