"""What a run prints before its first step."""

import math

from composer.utils import dist

from pospre.collectives import print_once
from pospre.errors import printable
from pospre.model.teacher import Momentum
from pospre.run.checkpoints.reading import Checkpoint
from pospre.run.resume import recorded
from pospre.schedules import duration_steps
from pospre.training.build import Components
from pospre.training.data import describe_data, describe_data_volume
from pospre.training.precision import describe_precision, slow_precision

_USUAL = 50  # steps, a fair half-life of a teacher in 250


def announce(parts: Components, start: Checkpoint | None, precision: str) -> None:
    """Print what will be trained, on what data and how, at the start of a process.

    Args:
        parts: resolved.
        start: the checkpoint that the run resumes from, on rank 0.
        precision: as the recipe has it, perhaps ``auto``.
    """
    if start is not None:
        _say_length(parts, start)
    print_once(printable(describe_data(parts.loader)))
    volume = describe_data_volume(parts.loader)
    if volume is not None and dist.get_local_rank() == 0:
        print(volume, flush=True)
    slow = slow_precision(parts.recipe, parts.device)
    if slow is not None:
        print_once(slow)
    print_once(_describe(parts, precision))
    momentum = parts.model.teachers.momentum
    if parts.recipe.encoder.weights is not None and momentum is not None:
        first = 0 if parts.stages is None else parts.stages.first_of_encoder
        wrong = pace(momentum, first, parts.total_steps)
        if wrong is not None:
            print_once(f"warning: {parts.model.layout.teacher}: {wrong}")


def pace(momentum: Momentum, first: int, total_steps: int) -> str | None:
    """Return what is wrong with a teacher that hardly follows, or is nearly the student.

    It lags by its half-life, ln 2 / (1 − momentum) steps. A fifth of the steps that it can follow,
    or 50, and what lies between is fine.

    Args:
        momentum: its schedule, over all steps.
        first: the step, counted from 0, from which the encoder trains.
        total_steps: of the run.
    """
    steps = total_steps - first
    half_life = math.log(2) / (1 - momentum.at(first / total_steps))
    least, most = sorted((_USUAL, steps / 5))
    if least <= half_life <= most:
        return None
    wrong = "hardly follows" if half_life > most else "is nearly the student"
    return (
        f"the teacher {wrong} in the {steps} steps that train the encoder: its half-life is "
        f"{half_life:.3g} steps. Choose a momentum_start between "
        f"{max(0.0, 1 - math.log(2) / least):.4g} and {max(0.0, 1 - math.log(2) / most):.4g}"
    )


def _describe(parts: Components, precision: str) -> str:
    """Describe in a line the training, its output, and how to stop it."""
    recipe, ranks = parts.recipe, dist.get_world_size()
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    device = parts.device.name if ranks == 1 else f"{ranks} × {parts.device.name}"
    precision = describe_precision(precision, recipe.trainer.precision, parts.device)
    return (
        f"{recipe.run_name}: {recipe.encoder.name} with {' + '.join(recipe.algorithms)}, "
        f"{parameters / 1e6:.1f} M parameters, on {device} in {precision}; "
        f"{parts.loader.num_samples} images, {parts.total_steps} steps of "
        f"{recipe.data.batch_size}, into {recipe.run_path()}. Ctrl-C saves and stops; the same "
        "command resumes"
    )


def _say_length(parts: Components, start: Checkpoint) -> None:
    """Describe the schedules if the run resumes with another length."""
    before = recorded(start.content).recipe["trainer"]["max_duration"]
    now, batch_size = parts.recipe.trainer.max_duration, parts.recipe.data.batch_size
    steps = duration_steps(before, steps_per_epoch=len(parts.loader), batch_size=batch_size)
    if steps == parts.total_steps or start.batch >= parts.total_steps:
        return
    scheduler = start.content["state"]["schedulers"][type(parts.schedule).__name__]
    pairs = zip(parts.schedule.base_lrs, parts.schedule.lr_lambdas, strict=True)
    rate = max(peak * share(start.batch) for peak, share in pairs)
    print_once(
        f"trainer.max_duration was {before}, is {now}: from step {start.batch + 1} on all "
        f"schedules are those of {parts.total_steps} steps instead of {steps}; the learning rate "
        f"is {rate:.3g} there, it would have been {max(scheduler['_last_lr']):.3g}"
    )
