"""What callbacks that judge every step share: on a GPU they look while the next step runs."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from composer.core import Callback, State
from composer.loggers import Logger

from pospre.batch import EPOCH, INDEX
from pospre.training.step_losses import is_late


class DoneStep(NamedTuple):
    """A step that is done.

    Attributes:
        number: counted from 1.
        losses: and metrics, by Composer's names.
        samples: ``index`` and ``epoch`` of its batch, as far as it has them.
    """

    number: int
    losses: Mapping[str, float]
    samples: dict[str, Any]


def done_step(state: State) -> DoneStep:
    """Return the step that is just done."""
    batch = state.batch if isinstance(state.batch, Mapping) else {}
    samples = {key: batch[key] for key in (INDEX, EPOCH) if key in batch}
    return DoneStep(state.timestamp.batch.value, state.total_loss_dict, samples)


class EachStep(Callback):
    """Judges every step, at most one step late, so that the host need not wait for a GPU.

    It does so at once before a checkpoint (``before_save``), at the end of an epoch and of
    training, and where the losses are there: on a CPU, or under Composer's own Trainer.
    """

    _unjudged: DoneStep | None = None

    @abstractmethod
    def judge_step(self, state: State, step: DoneStep) -> None:
        """Look at a step; all ranks do at the same time, and see the same losses."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Judge the step before, and this one unless its losses are still being computed."""
        self.settle(state)
        self._unjudged = done_step(state)
        if not is_late(state.total_loss_dict):
            self.settle(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Judge the last step of the epoch."""
        self.settle(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Judge the last step."""
        self.settle(state)

    def before_save(self, state: State) -> None:
        """Judge the step that is about to be saved."""
        self.settle(state)

    def settle(self, state: State) -> None:
        """Judge what is not judged yet."""
        step, self._unjudged = self._unjudged, None
        if step is not None:
            self.judge_step(state, step)
