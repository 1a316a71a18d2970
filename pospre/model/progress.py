"""The completed share of a training."""

from typing import NamedTuple

from composer.core import State, TimeUnit

from pospre.errors import UserError


class Progress(NamedTuple):
    """The completed share of the training, in [0, 1].

    Attributes:
        step: share in optimiser steps.
        epoch: share in whole epochs, for published per-epoch schedules.
        num_steps: steps of the whole training; None if only samples are counted.
    """

    step: float
    epoch: float
    num_steps: int | None = None


def as_progress(done: Progress | float) -> Progress:
    """Return the progress of a loop without Composer, given as one share.

    Raises:
        UserError: it is out of [0, 1].
    """
    if isinstance(done, Progress):
        return done
    if not 0 <= done <= 1:
        raise UserError(
            f"progress is {done}; give the completed share of the training, from 0 to 1: "
            "steps done / all steps."
        )
    return Progress(done, done)


def training_progress(state: State) -> Progress:
    """Return the progress of a Composer state; 0 while ``max_duration`` is unknown."""
    elapsed, total, now = state.get_elapsed_duration(), state.max_duration, state.timestamp
    if elapsed is None or total is None:
        return Progress(0.0, 0.0)
    if total.unit == TimeUnit.EPOCH:
        # Composer counts a duration in epochs by whole epochs
        steps = total.value * int(state.dataloader_len or 1)
        return Progress(now.batch.value / steps, now.epoch.value / total.value, steps)
    # the current, unfinished epoch does not count
    within = now.batch_in_epoch.value / max(now.batch.value, 1)
    num_steps = int(total.value) if total.unit == TimeUnit.BATCH else None
    return Progress(float(elapsed), float(elapsed) * (1 - within), num_steps)
