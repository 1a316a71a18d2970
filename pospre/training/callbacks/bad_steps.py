"""Callbacks that check the losses of every step, and the record of a bad one.

One detects spikes; the other ends a run before a loss or weight that is not finite reaches a
checkpoint.
"""

import json
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pospre.atomic_file import write_atomic
from pospre.batch import EPOCH, INDEX
from pospre.errors import UserError
from pospre.model.algorithm import pretrain_model
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.folders import checkpoints_of
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.training.callbacks.metrics import is_late, plain_losses
from pospre.training.callbacks.watchers import Watcher

_NORMAL = 1.4826  # converts a median distance into a normal distribution's deviation
_LEAST = 0.01  # of the median, so that a constant loss also has a deviation


class DoneStep(NamedTuple):
    """A finished step."""

    number: int  # counted from 1
    losses: Mapping[str, float]  # and metrics, by Composer's names
    samples: dict[str, Any]  # index and epoch of its batch, if it has them


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
        state: state of the training.
        step: the bad one.
        folder: for the file; None: ``bad_steps`` in the run's folder, or here.
        recipe: recipe of the run; None under your own Trainer.

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
        return f"Its samples could not be recorded ({error})."
    return f"Its samples are in {path}; pospre.training.replay repeats the step with them."


def kept_checkpoints(recipe: Recipe, step: int) -> str:
    """Describe the last good checkpoint: one from which a step before ``step`` succeeded."""
    checkpoints = checkpoints_of(recipe)
    good = next((checkpoint for checkpoint in checkpoints if checkpoint.batch < step - 1), None)
    kept = "there is no good one" if good is None else f"the last good one is {good.uri}"
    spoilt = [checkpoint.uri for checkpoint in checkpoints if checkpoint.batch == step - 1]
    source = f" ({spoilt[0]}, of the step before, gave this result)" if spoilt else ""
    return f"No checkpoint was saved since; {kept}{source}."


class LossSpikes(EachStep, Watcher):
    """Warns of, or stops at, a total loss that is ``factor`` deviations above the median.

    Median and deviation are over the last ``window`` steps. The deviation follows from the median
    distance to the median, so outliers hardly affect it. It must come before the saver. The step's
    samples are recorded.

    Args:
        action: ``warn``, or ``stop`` before the step is saved.
        window: number of steps to compare with; checks begin after a third of it.
        factor: deviations above the median that make a spike.
        recipe: of the run, for advice; None under your own Trainer.
        folder: for the step's samples; None: ``bad_steps`` in the run's folder.
        log: see ``Watcher``.
    """

    def __init__(
        self,
        *,
        action: Literal["warn", "stop"] = "warn",
        window: int = 100,
        factor: float = 10.0,
        recipe: Recipe | None = None,
        folder: Path | None = None,
        log: Path | None = None,
    ) -> None:
        super().__init__(log)
        self.action, self.window, self.factor = action, window, factor
        self.recipe = recipe
        self.folder = folder
        self._losses: deque[float] = deque(maxlen=window)
        self._last = 0

    def judge_step(self, state: State, step: DoneStep) -> None:
        """Compare the loss of a step with previous ones."""
        spike = self.spike(step.number, step.losses["loss/train/total"])
        if spike is None:
            return
        noted = note_step(state, step, self.folder, self.recipe)
        if self.action == "warn":
            self.warn(step.number, f"{spike}. {noted}")
            return
        kept = "" if self.recipe is None else f"{kept_checkpoints(self.recipe, step.number)} "
        raise UserError(
            f"training stopped: step {step.number}: {spike}. {kept}{noted} Add "
            "callbacks.loss_spikes.action=warn to the command to continue, or lower "
            "optimizer.base_lr under another run_name."
        )

    def spike(self, step: int, loss: float) -> str | None:
        """Return a description of a spike, or None; at most one per window."""
        if not math.isfinite(loss):
            return None  # handled by another callback
        before = list(self._losses)
        self._losses.append(loss)
        if 3 * len(before) < self.window or (self._last and step - self._last < self.window):
            return None
        middle = median(before)
        spread = _NORMAL * median(abs(value - middle) for value in before)
        limit = middle + self.factor * max(spread, _LEAST * abs(middle))
        if not loss > limit:
            return None
        self._last = step
        return (
            f"loss/total = {loss:.4g} is a spike: the median of the {len(before)} steps before is "
            f"{middle:.4g}, and values up to {limit:.4g} are usual"
        )


class Divergence(EachStep):
    """Raises a ``UserError`` after the first step with a loss that is not finite.

    The losses are averaged over the ranks, so all ranks see the same ones. Gradients that are not
    finite are ignored: with loss scaling such steps are skipped. It must come before the saver.

    Args:
        recipe: of the run, for advice; None under your own Trainer.
        folder: for the step's samples; None: ``bad_steps`` in the run's folder.
    """

    def __init__(self, recipe: Recipe | None = None, folder: Path | None = None) -> None:
        self.recipe = recipe
        self.folder = folder

    def judge_step(self, state: State, step: DoneStep) -> None:
        """Check the losses of a step; its line is already written."""
        losses = plain_losses(step.losses)
        bad = [
            f"{name} = {value}"
            for name, value in losses.items()
            if name.startswith("loss/") and not math.isfinite(value)
        ]
        if not math.isfinite(losses.get("loss/total", 0.0)):
            self._stop(state, step, ", ".join(bad))

    def before_save(self, state: State) -> None:
        """Raise on every rank if a loss or a weight is not finite.

        The weights are checked through a single number for the whole model.
        """
        super().before_save(state)
        tensors = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in state.model.state_dict().items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        finite = torch.stack([value.isfinite().all() for value in tensors.values()])
        everywhere = finite.to(torch.uint8)
        dist.all_reduce(everywhere, reduce_operation="MIN")
        good = everywhere.tolist()
        if not all(good):
            self._stop(state, done_step(state), f"tensor '{list(tensors)[good.index(0)]}'")

    def _stop(self, state: State, step: DoneStep, what: str) -> None:
        for saver in state.callbacks:
            if isinstance(saver, CheckpointSaver):
                saver.wait()  # the checkpoint that is named must be complete
        noted = note_step(state, step, self.folder, self.recipe)
        start = f"training diverged: after step {step.number} not finite: {what}."
        if self.recipe is None:
            raise UserError(f"{start} {noted} Lower the learning rate, or lengthen its warm-up.")
        options = self.recipe.trainer
        bf16 = ", trainer.precision=amp_bf16" if options.precision == "amp_fp16" else ""
        clip = ", set trainer.clip_grad" if options.clip_grad is None else ""
        raise UserError(
            f"{start} {kept_checkpoints(self.recipe, step.number)} {noted} Lower "
            f"optimizer.base_lr (now {self.recipe.optimizer.base_lr:g}), lengthen "
            f"schedule.warmup{clip}{bf16}, and start it under another run_name; or run the same "
            "command again if the cause is gone (damaged data, a faulty GPU)."
        )
