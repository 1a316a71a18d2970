"""The evaluations of a recipe: checked before training, run after it."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch

from pospre.collectives import print_once
from pospre.errors import UserError, suggestion
from pospre.evaluation.features import count_images
from pospre.evaluation.models import Start, moved, open_start
from pospre.evaluation.planned import Planned, planned_evaluations
from pospre.evaluation.registry import (
    check_settings,
    evaluation_module,
    figures_of,
    takes_start,
)
from pospre.evaluation.results_table import results_table
from pospre.evaluation.run import Checked, check_evaluation, encoder_hash, run_evaluation
from pospre.evaluation.verdict import figures_to_judge, power_line
from pospre.recipe.monitoring import Verdict
from pospre.recipe.provenance import concealed
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.folders import checkpoint_folders, checkpoints_of
from pospre.run.checkpoints.reading import Checkpoint, open_newest
from pospre.run.folder import starts_over
from pospre.training.build import build_model, model_of, without_pairs
from pospre.training.callbacks.metrics import read_lines
from pospre.training.data import open_data
from pospre.training.reference import with_encoders
from pospre.training.resolve import resolve
from pospre.untrusted_json import parse_object


def check_evaluations(recipe: Recipe) -> None:
    """Raise a ``UserError`` before training if an evaluation after it would fail."""
    if recipe.evaluation or recipe.verdict:
        recipe = resolve(with_encoders(recipe), open_data(recipe))
    if recipe.verdict is not None:
        _check_verdict(recipe.verdict, recipe)
    best_figure(recipe)
    images: dict[str, int] = {}
    missing: dict[str, str] = {}
    for entry in planned_evaluations(recipe):
        name = entry.name
        if entry.weights == "teacher" and not _has_teacher(recipe):
            raise UserError(
                f"recipe: evaluation.{name}.weights = teacher, but none of the algorithms "
                f"{', '.join(recipe.algorithms)} has one; leave it out, or add ema_teacher"
            )
        try:
            checked = check_evaluation(name, recipe, entry.data, entry.settings, entry.output)
        except UserError as error:
            raise error.restated(f"recipe: evaluation.{name}: {error}") from error
        missing |= {f"{name}/{figure}": why for figure, why in checked.missing.items()}
        images[name] = _images(entry, checked) if entry.is_declared else 0
    _check_start(recipe, images)
    for key, figure in _asked(recipe):
        if figure in missing:
            raise UserError(f"recipe: {key} = {figure}: {missing[figure]}")
    for figure in [] if recipe.verdict is None else figures_to_judge(recipe.verdict):
        print_once(power_line(figure, images[figure.partition("/")[0]]))


def _asked(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the figures that a recipe cannot do without, after the keys that name them."""
    if recipe.verdict is not None:
        yield from (("verdict.guard", each) for each in recipe.verdict.guard)
        yield "verdict.figure", recipe.verdict.figure or ""
    yield "trainer.keep_best", (recipe.trainer.keep_best or "").removeprefix("evaluation/")


def _check_verdict(verdict: Verdict, recipe: Recipe) -> None:
    """Raise a ``UserError`` if there is no start, or no figure that the guards belong to."""
    if recipe.encoder.weights is None:
        raise UserError(
            "recipe: verdict compares with the weights that training starts from; set "
            "encoder.weights, or remove the section"
        )
    for key, value in (("guard", verdict.guard), ("stop", verdict.stop)):
        if value and verdict.figure is None:
            raise UserError(f"recipe: verdict.{key} needs a verdict.figure, such as knn/top1")
    if verdict.weights == "student" and _has_teacher(recipe):
        print_once(
            "verdict: the student will be judged, but there is a teacher, which is usually better; "
            "verdict.weights: teacher judges it"
        )


def _check_start(recipe: Recipe, names: Iterable[str]) -> None:
    """Raise a ``UserError`` if the start of a new run cannot be measured beside it."""
    resumes = not starts_over(recipe) and checkpoints_of(recipe)
    if recipe.encoder.weights is None or resumes or not any(map(takes_start, names)):
        return  # a resumed run does not need the file
    try:
        open_start(recipe)
    except UserError as error:
        raise error.restated(
            f"recipe: the frozen start cannot be measured beside the run: {error} Or measure none: "
            "evaluation={} verdict=null"
        ) from error


def _images(entry: Planned, checked: Checked) -> int:
    """Return the number of images that an evaluation will measure."""
    module, settings = evaluation_module(entry.name), cast("Any", checked.settings)
    count: int | None = module.images(checked.opened) if hasattr(module, "images") else None
    if count is not None:
        return count
    count = count_images(entry.data, settings.half)
    return min(count, settings.num_samples or count)


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
    newest = next((each.batch for each in checkpoints_of(recipe)), None)
    if newest is None:
        return []
    planned = [entry for entry in planned_evaluations(recipe) if not entry.at_start]
    due = [entry for entry in planned if again or _current(entry, recipe, newest) is None]
    checkpoint = open_newest(checkpoint_folders(recipe)) if due else None
    if checkpoint is None:
        return []
    checkpoint.content["state"].pop("optimizers", None)  # twice the weights' size, not needed here
    failures = []
    for entry in due:
        options = {"progress": recipe.trainer.progress_bar, "step": checkpoint.batch}
        try:
            # training has measured those with an interval after its last step
            made = entry.every and _current(entry, recipe, checkpoint.batch)
            document = made or measure_checkpoint(entry, recipe, checkpoint, **options)
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
        start=_start(entry, recipe, checkpoint),
        **options,
    )


def _start(entry: Planned, recipe: Recipe, checkpoint: Checkpoint) -> Start | None:
    """Return the weights that training started from, if the evaluation measures them too."""
    if recipe.encoder.weights is None or not takes_start(entry.name):
        return None
    try:
        start = open_start(recipe)
        _check_same(start, entry.history)
        state = without_pairs(checkpoint.content["state"]["model"], recipe, checkpoint.uri)
        return start._replace(moved=moved(state, start.model))
    except UserError as error:
        print(f"{entry.name}: without the frozen start beside it: {error}", file=sys.stderr)
        return None


def _check_same(start: Start, history: Path) -> None:
    """Raise a ``UserError`` unless this is the start that the run's earlier looks are beside."""
    noted = (line.get("start_sha256") for line in read_lines(history))
    before = next((each for each in noted if each is not None), None)
    now = encoder_hash(start.model)
    if before not in (None, now):
        raise UserError(
            f"encoder.weights = {start.address} has changed since the run began: the hash of its "
            f"encoder is {now}, and was {before}. Put the earlier weights back"
        )


def _existing(entry: Planned) -> dict[str, Any]:
    """Return the existing results, or nothing if there are none."""
    try:
        return parse_object(entry.output.read_bytes())
    except (OSError, ValueError):
        return {}


def _current(entry: Planned, recipe: Recipe, step: int) -> dict[str, Any] | None:
    """Return the existing results if they are of this step, and as requested."""
    document = _existing(entry)
    if document.get("step") != step:
        return None
    settings = check_settings(entry.name, entry.settings).values()
    made = [document.get(key) for key in ("data", "weights", "settings")]
    wanted = concealed([entry.data, entry.weights, settings], recipe.environment)
    return document if made == json.loads(json.dumps(wanted)) else None


def _has_teacher(recipe: Recipe) -> bool:
    """Return whether a resolved recipe's model has a teacher; it is built without memory."""
    with torch.device("meta"):
        return build_model(recipe).teacher is not None
