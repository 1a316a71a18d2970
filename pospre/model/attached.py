"""Attaching algorithms to a model, and calling them before every forward with the progress."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from composer.core import Algorithm, State, TimeUnit

from pospre.batch import EPOCH, INDEX, Batch, loaded_keys, whole_numbers
from pospre.errors import UserError
from pospre.model.loop_checks import (
    check_claimed,
    check_is_batch,
    check_unwrapped,
    lacking,
)
from pospre.model.needs import check_needs, check_places

if TYPE_CHECKING:  # circular imports
    from pospre.model.algorithm import PretrainAlgorithm
    from pospre.model.model import PretrainModel


def attach_algorithm(model: PretrainModel, algorithm: PretrainAlgorithm) -> None:
    """Attach ``algorithm`` to ``model`` and list it there, unless it is already listed.

    Raises:
        UserError: it is not an algorithm, another one of this name is attached, or it cannot work
            with this model.
    """
    if not hasattr(algorithm, "module_name") or isinstance(algorithm, type):
        raise UserError(
            f"PretrainModel got {algorithm!r} as an algorithm; make algorithms with their options, "
            "such as [pospre.MAE(mask_ratio=0.75), pospre.DropPos(weight=0.05)]."
        )
    name, listed = algorithm.module_name(), model.algorithms
    if any(each is algorithm for each in listed):
        return
    check_unwrapped(model, name)
    if name in [each.module_name() for each in listed]:
        raise UserError(
            f"algorithms.{name} is already attached to this model; attach it once, and pass "
            "algorithms=model.algorithms to the Trainer."
        )
    joining = [each.module_name() for each in listed if not each.is_host]
    if algorithm.is_host and joining:
        raise UserError(
            f"algorithms.{name} is a host, but {joining[0]} is already attached. Attach {name} "
            f"first, then {joining[0]}."
        )
    algorithm.check_encoder(model.encoder)
    check_needs(model, name, algorithm.needs(model.encoder))
    algorithm.check_company(model)
    algorithm.attach(model)
    check_places(model)
    model.to(next(model.encoder.parameters()).device)  # the encoder may have been moved
    model.algorithms.append(algorithm)
    model.loop_watch.has_new_tensors = True


def check_given(model: PretrainModel, algorithms: Sequence[Algorithm]) -> None:
    """Raise ``UserError`` unless all attached algorithms, and the teacher's, are given once."""
    ours = [cast("PretrainAlgorithm", each) for each in algorithms if hasattr(each, "module_name")]
    names = [each.module_name() for each in ours]
    for name in (each for each in names if names.count(each) > 1):
        raise UserError(f"algorithms.{name} is given twice; give it once.")
    left = [name for each in model.algorithms if (name := each.module_name()) not in names]
    if left:
        raise UserError(
            f"algorithms.{left[0]} is attached to the model, but is not given; pass "
            "algorithms=model.algorithms to the Trainer."
        )
    owner = model.teachers.owner
    if owner is not None and not any(owner in each.names() for each in ours):
        raise UserError(
            f"algorithms: the teacher belongs to '{owner}', but no algorithm given has this name "
            f"({', '.join(names)}), so nothing would update it. Give all algorithms; your own ones "
            "create it by model.add_teacher(self.module_name(), …)."
        )


def begin_step(model: PretrainModel, batch: Batch, progress: Progress | float) -> None:
    """Write the draws of all algorithms into ``batch``; see ``PretrainModel.prepare``."""
    if not isinstance(progress, Progress):  # a loop without Composer
        check_given(model, model.algorithms)
        progress = as_progress(progress)
        model.loop_watch.begin(model, progress.step)
    write_draws(model, model.algorithms, batch, progress)


def write_draws(
    model: PretrainModel,
    algorithms: Sequence[PretrainAlgorithm],
    batch: Batch,
    progress: Progress,
) -> None:
    """Set the schedules of ``algorithms`` and write their draws into ``batch``.

    Raises:
        UserError: the batch has no integer ``index`` or ``epoch``, other samples had the same, or
            an algorithm's input is missing.
    """
    for algorithm in algorithms:
        algorithm.schedule(model, progress)
    model.draw_stream(partial(_written, model, algorithms, batch))


def _written(model: PretrainModel, algorithms: Sequence[PretrainAlgorithm], batch: Batch) -> Batch:
    """Return ``batch``, with the draws of ``algorithms`` in it."""
    check_is_batch(batch)
    for key in (INDEX, EPOCH):
        if key not in batch:
            raise UserError(
                f"the batch lacks '{key}', from which masks are drawn. pospre.build_loader writes "
                "it, and so does pospre.from_images(images, index=…, epoch=…)."
            )
        batch[key] = whole_numbers(batch[key], key)
    if model.training:
        model.loop_watch.numbers.look(batch)
    for algorithm in algorithms:
        before = {**batch}
        try:
            algorithm.write(batch, model)
        except KeyError as error:
            key = error.args[0]
            if key in batch or key not in (*model.registry.writers, *loaded_keys(model.views)):
                raise
            raise lacking(model.registry, key) from error
        check_claimed(model, algorithm, before, batch)
    return batch


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
