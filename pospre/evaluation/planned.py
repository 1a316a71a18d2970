"""The evaluations of a recipe: checked before its training, done after it."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pospre.errors import UserError
from pospre.evaluation.registry import evaluation_module
from pospre.evaluation.run import check_evaluation, run_evaluation
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from pospre.training.checkpoints.content import model_of
from pospre.training.checkpoints.finding import checkpoint_folders
from pospre.training.checkpoints.reading import open_newest
from pospre.training.data import open_data
from pospre.training.resolve import resolve


class Planned(NamedTuple):
    """An entry of a recipe's ``evaluation``.

    Attributes:
        name: of the evaluation.
        data: where to measure; the training images where the entry says nothing.
        weights: whose.
        settings: its other keys.
        output: where its results go.
    """

    name: str
    data: str
    weights: Literal["student", "teacher"]
    settings: dict[str, Any]
    output: Path


def planned_evaluations(recipe: Recipe) -> list[Planned]:
    """Return the entries of ``evaluation``, checked as far as that goes without their modules."""
    planned = []
    for name, given in recipe.evaluation.items():
        settings = {"data": recipe.data.path, "weights": "student", **given}
        data, weights = settings.pop("data"), settings.pop("weights")
        if not isinstance(data, str):
            raise UserError(f"recipe: evaluation.{name}.data = {data}; give the path of a data set")
        if weights not in ("student", "teacher"):
            raise UserError(f"recipe: evaluation.{name}.weights is student or teacher")
        output = recipe.run_path() / "evaluation" / f"{name}.json"
        planned.append(Planned(name, data, weights, settings, output))
    return planned


def check_evaluations(recipe: Recipe) -> None:
    """Raise a ``UserError`` before training for an evaluation that could not be done after it."""
    for name, data, weights, settings, output in planned_evaluations(recipe):
        try:
            check_evaluation(name, recipe, data, settings, output)
        except UserError as error:
            raise UserError(f"recipe: evaluation.{name}: {error}") from error
        if weights == "teacher" and not _has_teacher(recipe):
            raise UserError(
                f"recipe: evaluation.{name}.weights = teacher, but none of the algorithms "
                f"{', '.join(recipe.algorithms)} keeps one; leave it out, or add ema_teacher"
            )


def run_evaluations(recipe: Recipe, *, again: bool) -> list[UserError]:
    """Measure the newest checkpoint that is whole, and print the tables; return what failed.

    Args:
        recipe: of a finished run.
        again: also redo those whose results are there.
    """
    due = [entry for entry in planned_evaluations(recipe) if again or not entry.output.exists()]
    checkpoint = open_newest(checkpoint_folders(recipe)) if due else None
    if checkpoint is None:
        return []
    checkpoint.content["state"].pop("optimizers", None)  # twice the weights, for nothing here
    failures = []
    for name, data, weights, settings, output in due:
        try:
            document = run_evaluation(
                name,
                *model_of(checkpoint, weights=weights),
                data,
                settings,
                output,
                checkpoint=checkpoint.uri,
                weights=weights,
                device=recipe.trainer.device,
                progress=recipe.trainer.progress_bar,
            )
        except UserError as error:
            failures.append(error)
        else:
            print(evaluation_module(name).table(document["results"]))
    return failures


def _has_teacher(recipe: Recipe) -> bool:
    """Tell whether a recipe's model has a teacher; it is built without memory."""
    with torch.device("meta"):
        return build_model(resolve(recipe, open_data(recipe))).teacher is not None
