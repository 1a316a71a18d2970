"""Resolves a recipe: every argument is checked and filled in, including those from the data."""

from collections.abc import Sequence
from pathlib import Path

from pospre.arguments import check_arguments
from pospre.data.stores.reader import Features, Reader
from pospre.errors import UserError
from pospre.model.algorithm import algorithm_class
from pospre.recipe.files import find_recipe
from pospre.recipe.provenance import annotate, origins, values
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.data import open_data
from pospre.training.loggers import check_loggers

_MEASURE = "python -m data_prep.statistics"


def resolve(recipe: Recipe, reader: Reader | None = None) -> Recipe:
    """Return the recipe with all values, so that it fully defines the training.

    A resolved one is returned unchanged. The training data of ``reader`` determine the number of
    classes and the normalisation of pixels or features; without it these stay open. A checkpoint
    keeps them, so that other data, such as held-out ones, are normalised in the same way.
    ``UserError`` if an algorithm or one of its arguments is unknown or of a wrong type, or the data
    do not fit.
    """
    data = recipe.data
    if reader is not None:
        data = data.model_copy(update=_statistics(recipe, reader))
    algorithms = {}
    for name, given in recipe.algorithms.items():
        kind = algorithm_class(name)
        arguments = check_arguments(f"algorithms.{name}", kind, given)
        if reader is not None:
            arguments = kind.for_classes(arguments, reader.classes, data.path)
        algorithms[name] = arguments
    return recipe.model_copy(update={"data": data, "algorithms": algorithms})


def describe(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the complete recipe in a file as YAML, with the origin of each value.

    The data need not exist: values that depend on them are then left open, with a note.
    """
    path = find_recipe(path)
    recipe = resolve(load_recipe(path, overrides))
    check_loggers(recipe)
    came_from = origins(path, overrides)
    title = f"# {path}, complete; each value with where it comes from"
    try:
        reader = open_data(recipe)
    except UserError as error:
        note = "# null may stand for what the data decide (their classes, mean and std):"
        title += f"\n{note}\n# {error}"
        complete = recipe.dump()
    else:
        complete = resolve(recipe, reader).dump()
        before = dict(values(recipe.dump()))
        found = dict.fromkeys((k for k, value in values(complete) if value != before[k]), "data")
        came_from = {**came_from, **found}
    return f"{title}\n\n{annotate(complete, came_from)}"


def _statistics(recipe: Recipe, reader: Reader) -> dict[str, tuple[float, ...] | None]:
    """Return ``mean`` and ``std``: given, or recorded by the data set; None for ImageNet's."""
    channels, features = recipe.encoder.channels, reader.features
    if features is not None and channels != 1:
        raise UserError(
            f"encoder.channels = {channels}, but {reader.address} holds features, which have 1"
        )
    given = {"mean": recipe.data.mean, "std": recipe.data.std}
    noted = features or reader.noted
    # for other channels than stored, they do not apply
    if isinstance(noted, Features) or (noted is not None and channels == noted.channels != 3):
        given = {key: given[key] or getattr(noted, key) or None for key in given}
    count = channels if features is None else features.shape[1]
    for key, numbers in given.items():
        if numbers is not None and len(numbers) not in (1, count):
            raise UserError(f"data.{key} has {len(numbers)} numbers; give one, or {count}")
    if features is None and channels != 3 and None in given.values():
        raise UserError(
            f"data.mean and data.std: {reader.address} holds images and notes none for "
            f"encoder.channels = {channels}; give {channels} number(s) each (`{_MEASURE} "
            f"{reader.address} --channels {channels}` measures them), or convert with --channels "
            f"{channels}."
        )
    return given
