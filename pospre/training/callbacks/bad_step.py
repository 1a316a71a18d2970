"""Records the samples of a bad step, so that it can be replayed."""

import json
import math
from pathlib import Path

from composer.core import State
from composer.utils import dist

from pospre.atomic_file import write_atomic
from pospre.model.algorithm import pretrain_model
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.finding import checkpoints_of
from pospre.training.callbacks.each_step import DoneStep
from pospre.training.callbacks.metrics import plain_losses

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
