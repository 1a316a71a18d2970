"""Detects loss spikes: losses far above those of previous steps."""

import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Literal

from composer.core import State

from pospre.errors import UserError
from pospre.recipe.recipe import Recipe
from pospre.training.callbacks.each_step import DoneStep, EachStep, kept_checkpoints, note_step
from pospre.training.callbacks.watcher import Watcher

_NORMAL = 1.4826  # converts a median distance into a normal distribution's deviation
_LEAST = 0.01  # of the median, so that a constant loss also has a deviation


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
        found = self.spike(step.number, step.losses["loss/train/total"])
        if found is None:
            return
        noted = note_step(state, step, self.folder, self.recipe)
        if self.action == "warn":
            self.warn(step.number, f"{found}. {noted}")
            return
        kept = "" if self.recipe is None else f"{kept_checkpoints(self.recipe, step.number)} "
        raise UserError(
            f"training stopped: step {step.number}: {found}. {kept}{noted} Give the same command "
            "with callbacks.loss_spikes.action=warn to go on, or lower optimizer.base_lr under "
            "another run_name."
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
            f"loss/total = {loss:.4g} is a spike: the median of {len(before)} steps before is "
            f"{middle:.4g}, and up to {limit:.4g} is usual"
        )
