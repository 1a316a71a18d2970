"""The evaluations of a recipe: checked before training, run after it."""

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pospre.errors import UserError, suggestion
from pospre.evaluation.registry import check_settings, figures_of
from pospre.evaluation.results_table import results_table
from pospre.evaluation.run import check_evaluation, run_evaluation
from pospre.recipe.provenance import concealed
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.folders import checkpoint_folders, checkpoints_of
from pospre.run.checkpoints.reading import Checkpoint, open_newest
from pospre.training.build import build_model, model_of, resolve
from pospre.training.data import open_data
from pospre.training.start_encoder import with_encoder
from pospre.untrusted_json import parse_object

_INTERVAL = re.compile(r"[1-9]\d*(ep|ba|sp)")


class Planned(NamedTuple):
    """An entry of a recipe's ``evaluation``; without ``every`` it is measured only at the end."""

    name: str
    data: str
    weights: Literal["student", "teacher"]
    every: str | None
    settings: dict[str, Any]
    output: Path

    @property
    def prefix(self) -> str:
        """Prefix of its figures in ``metrics.jsonl``."""
        return f"evaluation/{self.name}"


def planned_evaluations(recipe: Recipe) -> list[Planned]:
    """Return the entries of ``evaluation``, checked without importing their modules."""
    planned = []
    for name, given in recipe.evaluation.items():
        settings = {"data": recipe.data.path, "weights": "student", "every": None, **given}
        data, weights, every = (settings.pop(key) for key in ("data", "weights", "every"))
        if not isinstance(data, str):
            raise UserError(f"recipe: evaluation.{name}.data = {data}; give the path of a data set")
        if weights not in ("student", "teacher"):
            raise UserError(f"recipe: evaluation.{name}.weights is student or teacher")
        if every is not None and not (isinstance(every, str) and _INTERVAL.fullmatch(every)):
            raise UserError(
                f"recipe: evaluation.{name}.every = {every}; give an interval such as 10ep "
                "(epochs), 500ba (steps) or 100000sp (samples)"
            )
        output = recipe.run_path() / "evaluation" / f"{name}.json"
        planned.append(Planned(name, data, weights, every, settings, output))
    return planned


def check_evaluations(recipe: Recipe) -> None:
    """Raise a ``UserError`` before training if an evaluation after it would fail."""
    if recipe.evaluation:
        recipe = resolve(with_encoder(recipe), open_data(recipe))
    for name, data, weights, _, settings, output in planned_evaluations(recipe):
        if weights == "teacher" and not _has_teacher(recipe):
            raise UserError(
                f"recipe: evaluation.{name}.weights = teacher, but none of the algorithms "
                f"{', '.join(recipe.algorithms)} has one; leave it out, or add ema_teacher"
            )
        try:
            check_evaluation(name, recipe, data, settings, output)
        except UserError as error:
            raise error.restated(f"recipe: evaluation.{name}: {error}") from error
    best_figure(recipe)


def best_figure(recipe: Recipe) -> tuple[str, Literal["max", "min"]] | None:
    """Return the figure of ``trainer.keep_best`` in ``metrics.jsonl``, and which value is best."""
    wanted = recipe.trainer.keep_best
    if wanted is None:
        return None
    figures = {
        f"{entry.prefix}/{key}": better
        for entry in planned_evaluations(recipe)
        if entry.every is not None
        for key, better in figures_of(entry.name).items()
    }
    name = f"evaluation/{wanted.removeprefix('evaluation/')}"
    if name not in figures:
        known = [figure.removeprefix("evaluation/") for figure in figures]
        none = "; give an evaluation an interval, such as evaluation.knn.every: 10ep"
        raise UserError(
            f"recipe: trainer.keep_best = {wanted}, which is not measured during training"
            + (f".{suggestion(wanted, known)}" if known else none)
        )
    return name, figures[name]


def run_evaluations(recipe: Recipe, *, again: bool) -> list[UserError]:
    """Measure a finished run's newest complete checkpoint, and print the tables; return the errors.

    With ``again``, evaluations that already have results of this checkpoint are repeated.
    """
    newest = [found.batch for found in checkpoints_of(recipe)[:1]]
    planned = planned_evaluations(recipe)
    due = [entry for entry in planned if again or [_existing(entry).get("step")] != newest]
    checkpoint = open_newest(checkpoint_folders(recipe)) if newest and due else None
    if checkpoint is None:
        return []
    checkpoint.content["state"].pop("optimizers", None)  # twice the weights' size, not needed here
    failures = []
    for entry in due:
        options = {"progress": recipe.trainer.progress_bar, "step": checkpoint.batch}
        try:
            document = _done(entry, recipe, checkpoint.batch) or measure_checkpoint(
                entry, recipe, checkpoint, **options
            )
        except UserError as error:
            failures.append(error)
        else:
            print(results_table(entry.name, document["results"]))
    return failures


def measure_checkpoint(
    entry: Planned, recipe: Recipe, checkpoint: Checkpoint, **options: Any
) -> dict[str, Any]:
    """Return the document of a recipe's evaluation; ``options`` are those of ``run_evaluation``."""
    model, made_of = model_of(checkpoint, weights=entry.weights)
    return run_evaluation(
        entry.name,
        model,
        made_of.with_places_of(recipe),
        entry.data,
        entry.settings,
        entry.output,
        address=checkpoint.uri,
        weights=entry.weights,
        device=recipe.trainer.device,
        **options,
    )


def _existing(entry: Planned) -> dict[str, Any]:
    """Return the existing results, or nothing if there are none."""
    try:
        return parse_object(entry.output.read_bytes())
    except (OSError, ValueError):
        return {}


def _done(entry: Planned, recipe: Recipe, step: int) -> dict[str, Any] | None:
    """Return the results that training measured after its last step, if they are as requested."""
    if entry.every is None:
        return None
    document, settings = _existing(entry), check_settings(entry.name, entry.settings).values()
    found = [document.get(key) for key in ("step", "data", "weights", "settings")]
    wanted = concealed([step, entry.data, entry.weights, settings], recipe.environment)
    return document if found == json.loads(json.dumps(wanted)) else None


def _has_teacher(recipe: Recipe) -> bool:
    """Return whether a resolved recipe's model has a teacher; it is built without memory."""
    with torch.device("meta"):
        return build_model(recipe).teacher is not None
