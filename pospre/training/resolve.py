"""The complete recipe: what it leaves open, its data and the weights that it starts from decide."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pospre.arguments import check_arguments
from pospre.data.stores.description import TrainedOn
from pospre.data.stores.reader import Features, Reader
from pospre.errors import UserError
from pospre.external_class import UntrustedClass
from pospre.model.algorithm import algorithm_class
from pospre.recipe.files import find_recipe
from pospre.recipe.inputs import Encoder
from pospre.recipe.provenance import annotate, origins, values
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.data import check_addresses, open_data
from pospre.training.loggers import check_loggers
from pospre.training.start_encoder import with_encoder

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
            arguments = with_classes(name, arguments, reader.classes, data.path)
            arguments = with_images(name, arguments, len(reader), data.path)
        algorithms[name] = arguments
    resolved = recipe.model_copy(update={"data": data, "algorithms": algorithms})
    if reader is None:
        return resolved
    return resolved.with_training_data(TrainedOn(reader.classes))


def with_classes(
    name: str, arguments: dict[str, Any], classes: Sequence[str] | None, path: str
) -> dict[str, Any]:
    """Return an algorithm's arguments; ``num_classes``, if it is one and null, from the data.

    Args:
        name: of the algorithm.
        arguments: all arguments of its constructor.
        classes: names of the data's classes; None: no labels.
        path: path of the data, for errors.

    Raises:
        UserError: the data have no labels, one class, or more classes than ``num_classes``.
    """
    if "num_classes" not in arguments:
        return arguments
    given = arguments["num_classes"]
    if classes is None or len(classes) < 2:
        held = "no labels" if classes is None else f"one class, {classes[0]}"
        raise UserError(
            f"{name} needs two or more classes, but data.path = {path} has {held}; put the images "
            "into one folder per class."
        )
    if given is not None and given < len(classes):
        raise UserError(
            f"{name}.num_classes = {given}, but data.path = {path} has {len(classes)} classes; set "
            "it to null to take theirs."
        )
    return {**arguments, "num_classes": given or len(classes)}


def with_images(name: str, arguments: dict[str, Any], count: int, path: str) -> dict[str, Any]:
    """Return an algorithm's arguments; ``num_images``, if it is one and null, is ``count``.

    Raises:
        UserError: the data have more images than ``num_images``.
    """
    given = arguments.get("num_images", count)
    if given is not None and given < count:
        raise UserError(
            f"{name}.num_images = {given}, but data.path = {path} has {count}; set it to null to "
            "take theirs."
        )
    return {**arguments, "num_images": given or count} if "num_images" in arguments else arguments


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


def trusted_part(recipe: Recipe) -> tuple[Recipe, list[UserError]]:
    """Return a recipe without the classes that are not trusted, and what is said of each."""
    kept, errors = dict(recipe.algorithms), list[UserError]()
    for name in recipe.algorithms:
        try:
            algorithm_class(name)
        except UntrustedClass as error:
            del kept[name]
            errors.append(error)
    return recipe.model_copy(update={"algorithms": kept}), errors


def describe(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the complete recipe in a file as YAML, with the origin of each value.

    The data need not exist: values that depend on them are then left open, with a note. The file
    may be a stranger's: classes that are not trusted are left as written, with a note.
    """
    path = find_recipe(path)
    written = load_recipe(path, overrides)
    check_addresses(written, "encoder.weights")
    recipe, untrusted = trusted_part(with_encoder(written))
    recipe = resolve(recipe)
    check_loggers(recipe)
    came_from = origins(path, overrides) | _changed(written.encoder, recipe.encoder)
    title = f"# {path}, complete; each value with where it comes from"
    title += "".join(f"\n# as written: {error}" for error in untrusted)
    try:
        check_addresses(recipe)
        reader = open_data(recipe)
    except UserError as error:
        note = "# null may stand for what the data decide (their classes, mean and std):"
        title += f"\n{note}\n# {error}"
        complete = recipe.dump()
    else:
        complete = resolve(recipe, reader).dump()
        before = dict(values(recipe.dump()))
        changed = (key for key, value in values(complete) if value != before[key])
        came_from = {**came_from, **dict.fromkeys(changed, "data")}
    complete["algorithms"] = {**written.algorithms, **complete["algorithms"]}
    return f"{title}\n\n{annotate(complete, came_from)}"


def _changed(written: Encoder, now: Encoder) -> dict[str, str]:
    """Return the origin of the encoder's options that its weights show, by dotted key."""
    sections = [{"encoder": section.model_dump(mode="json")} for section in (written, now)]
    before, after = (dict(values(section)) for section in sections)
    shown = [key for key, value in after.items() if before.get(key) != value]
    return dict.fromkeys(shown, "encoder.weights")
