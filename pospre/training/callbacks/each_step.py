"""Base of callbacks that check every step, and the record of a bad one."""

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.atomic_file import write_atomic
from pospre.batch import EPOCH, INDEX
from pospre.model.algorithm import pretrain_model
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.finding import checkpoints_of
from pospre.training.callbacks.metrics import plain_losses
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


BAD_STEPS = "bad_steps"
"""Their folder in a run's folder."""


def note_step(state: State, step: DoneStep, folder: Path | None, recipe: Recipe | None) -> str:
    """Write ``ba<step>.json`` about a finished step; all ranks call it together.

    It has ``step``, ``seed``, the ``losses`` (as text if not finite), for each rank the ``index``
    and ``epoch`` of every sample (``ranks``), and the ``recipe``.

    Args:
        state: of the training.
        step: the bad one.
        folder: for the file; None: ``bad_steps`` in the run's folder, or here.
        recipe: of the run; None under your own Trainer.

    Returns:
        A sentence with its path, or with the error if it cannot be written.
    """
    ranks = dist.all_gather_object({key: value.tolist() for key, value in step.samples.items()})
    folder = folder or (recipe.run_path() if recipe else Path()) / BAD_STEPS
    path = folder / f"ba{step.number}.json"
    if dist.get_global_rank() > 0:
        return ""
    noted = {
        "step": step.number,
        "seed": pretrain_model(state).seed,
        "losses": {
            name: value if math.isfinite(value) else str(value)
            for name, value in plain_losses(step.losses).items()
        },
        "ranks": ranks,
        "recipe": None if recipe is None else recipe.record(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(noted, allow_nan=False).encode())
    except OSError as error:
        return f"Its samples could not be written down ({error})."
    return f"Its samples are in {path}, from which pospre.training.callbacks.replay makes it again."


def kept_checkpoints(recipe: Recipe, step: int) -> str:
    """Describe the last good checkpoint: one from which a step before ``step`` succeeded."""
    found = checkpoints_of(recipe)
    good = next((checkpoint for checkpoint in found if checkpoint.batch < step - 1), None)
    kept = "there is no good one" if good is None else f"the last good one is {good.uri}"
    spoilt = [checkpoint.uri for checkpoint in found if checkpoint.batch == step - 1]
    told = f" ({spoilt[0]}, of the step before, gave this result)" if spoilt else ""
    return f"No checkpoint was saved since; {kept}{told}."
