"""How far a training is."""

from typing import NamedTuple

from composer.core import State, TimeUnit

from pospre.errors import UserError


class Progress(NamedTuple):
    """How much of the training is done, in [0, 1].

    Attributes:
        step: counted in optimiser steps.
        epoch: counted in whole epochs, as per-epoch schedules of published code do.
        num_steps: of the whole training; None where only its samples are counted.
    """

    step: float
    epoch: float
    num_steps: int | None = None


def as_progress(done: Progress | float) -> Progress:
    """Return the progress of a loop without Composer, which has its share alone.

    Raises:
        UserError: it is no share.
    """
    if isinstance(done, Progress):
        return done
    if not 0 <= done <= 1:
        raise UserError(
            f"progress is {done}; give the share of the whole training that is done, from 0 to 1: "
            "steps done / all steps."
        )
    return Progress(done, done)


def training_progress(state: State) -> Progress:
    """Return the progress of a Composer state; 0 before ``max_duration`` is known."""
    elapsed, total, now = state.get_elapsed_duration(), state.max_duration, state.timestamp
    if elapsed is None or total is None:
        return Progress(0.0, 0.0)
    if total.unit == TimeUnit.EPOCH:
        # Composer counts a duration in epochs by whole epochs
        steps = total.value * int(state.dataloader_len or 1)
        return Progress(now.batch.value / steps, now.epoch.value / total.value, steps)
    # what the epoch under way has added does not count as an epoch
    within = now.batch_in_epoch.value / max(now.batch.value, 1)
    num_steps = int(total.value) if total.unit == TimeUnit.BATCH else None
    return Progress(float(elapsed), float(elapsed) * (1 - within), num_steps)
