"""From a recipe to the components of its trainer, or from a checkpoint to its model.

A recipe is resolved first: every argument is checked and filled in, including those from the data.
All user mistakes are found here, before anything is written.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from composer.devices import Device
from torch import nn
from torch.optim import Optimizer

from pospre.arguments import check_arguments
from pospre.data.loader import ViewLoader
from pospre.data.stores.description import TrainedOn
from pospre.data.stores.reader import Features, Reader
from pospre.errors import UserError
from pospre.external_class import UntrustedClass
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.nn.build import build_encoder
from pospre.nn.lora import add_lora, merged_state
from pospre.nn.lora_options import LoraOptions
from pospre.recipe.files import find_recipe
from pospre.recipe.provenance import annotate, origins, values
from pospre.recipe.recipe import Recipe, load_recipe, recorded_recipe
from pospre.recipe.sections import Encoder
from pospre.run.checkpoints.reading import Checkpoint, open_checkpoint
from pospre.run.device import build_device
from pospre.run.resume import compare_tensors, recorded
from pospre.training.data import build_data, build_views, check_addresses, open_data
from pospre.training.loggers import check_loggers
from pospre.training.optimizer.schedule import StepSchedule
from pospre.training.precision import decide_precision, set_residual
from pospre.training.scale.fsdp import num_copies
from pospre.training.stages import build_rates, build_stages
from pospre.training.start_encoder import with_encoder
from pospre.training.weight_records import Weights
from pospre.trust import trust_classes

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
        found = "no labels" if classes is None else f"one class, {classes[0]}"
        raise UserError(
            f"{name} needs two or more classes, but data.path = {path} has {found}; put the images "
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
        found = dict.fromkeys((k for k, value in values(complete) if value != before[k]), "data")
        came_from = {**came_from, **found}
    complete["algorithms"] = {**written.algorithms, **complete["algorithms"]}
    return f"{title}\n\n{annotate(complete, came_from)}"


def _changed(written: Encoder, now: Encoder) -> dict[str, str]:
    """Return the origin of the encoder's options that its weights show, by dotted key."""
    found = [{"encoder": section.model_dump(mode="json")} for section in (written, now)]
    before, after = (dict(values(section)) for section in found)
    shown = [key for key, value in after.items() if before.get(key) != value]
    return dict.fromkeys(shown, "encoder.weights")


@dataclass(frozen=True)
class Components:
    """The components of a trainer: checked, with nothing written yet."""

    recipe: Recipe
    device: Device
    loader: ViewLoader
    model: PretrainModel
    optimizer: Optimizer
    schedule: StepSchedule
    stages: Stages | None = None  # of the recipe

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.schedule.total_steps


def build_components(
    recipe: Recipe, device: Device | None = None, reference: PretrainModel | None = None
) -> Components:
    """Return the recipe, resolved with its data, and its components.

    Classes of other packages are imported: who trains a recipe trusts it.
    """
    trust_classes(recipe.class_names)
    check_loggers(recipe)
    device = device or build_device(recipe)
    if recipe.trainer.fsdp is not None:
        num_copies(recipe.trainer.fsdp)  # raises if it does not divide
    loader = build_data(recipe)
    recipe = decide_precision(resolve(recipe, loader.reader), device)
    return make_components(recipe, device, loader, reference)


def make_components(
    recipe: Recipe, device: Device, loader: ViewLoader, reference: PretrainModel | None = None
) -> Components:
    """Return the components of a resolved recipe, built around an existing loader."""
    model = build_model(recipe, reference)
    stages = build_stages(model, recipe, len(loader))
    rates = build_rates(recipe, loader, model, stages)
    return Components(recipe, device, loader, model, *rates, stages)


def in_stages(
    parts: Components, starts: Sequence[int], fresh: Collection[str], step: int
) -> Components:
    """Return components for a run that is at ``step``; see ``Stages``."""
    if parts.stages is None:
        return parts
    stages = parts.stages.resumed(starts, fresh, step)
    optimizer, schedule = build_rates(parts.recipe, parts.loader, parts.model, stages)
    return replace(parts, optimizer=optimizer, schedule=schedule, stages=stages)


def build_algorithms(recipe: Recipe) -> list[PretrainAlgorithm]:
    """Return the algorithms of a resolved recipe."""
    by_name: dict[str, str] = {}
    made = []
    for key, given in recipe.algorithms.items():
        kind = algorithm_class(key)
        other = by_name.setdefault(kind.module_name(), key)
        if other != key:
            raise UserError(
                f"algorithms: '{other}' and '{key}' would both have the loss term "
                f"'{kind.module_name()}'. Leave one out, or give its class another name."
            )
        made.append(kind(**given))
    return made


def build_model(recipe: Recipe, reference: PretrainModel | None = None) -> PretrainModel:
    """Return a resolved recipe's model.

    Without its ``reference``, one with random weights and of the shape that the recipe says takes
    its place, or of the encoder's. The weights are a function of the recipe's seed: the same on
    every rank and at every start.
    """
    algorithms = build_algorithms(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        encoder = build_encoder(**recipe.encoder.arguments())
        frozen: nn.Module | None = reference
        if recipe.reference is not None and reference is None:
            frozen = build_encoder(**(recipe.reference.encoder or recipe.encoder).arguments())
    if recipe.lora is not None:
        whole = max((stage.train.last or 0 for stage in recipe.stages), default=0)
        pairs = recipe.lora.model_dump()
        add_lora(encoder, blocks=encoder.depth - whole, seed=recipe.seed, **pairs)
    model = PretrainModel(
        encoder,
        algorithms,
        seed=recipe.seed,
        views=build_views(recipe),
        mean=recipe.data.mean,
        std=recipe.data.std,
        reference=frozen,
    )
    set_residual(model, recipe)
    return model


def load_model(uri: str, *, weights: Weights = "student") -> tuple[PretrainModel, Recipe]:
    """Return the model of a checkpoint, in eval mode on the CPU, and its recipe.

    Pairs of LoRA are merged into the weights, and the recipe has none.

    Args:
        uri: a checkpoint, a folder of them or a run folder (the newest counts), local or S3.
        weights: ``teacher`` loads the teacher's weights instead of the trained ones.

    Raises:
        UserError: no such checkpoint, the file is damaged or of another model, or it has no
            teacher.
    """
    return model_of(open_checkpoint(str(uri)), weights=weights)


def model_of(
    checkpoint: Checkpoint, *, weights: Weights = "student"
) -> tuple[PretrainModel, Recipe]:
    """Do the same as ``load_model`` for a checkpoint that is already in memory."""
    uri, content = checkpoint.uri, checkpoint.content
    record = recorded(content)
    recipe = resolve(recorded_recipe(record.recipe, source=f"recipe in {uri}"))
    recipe = recipe.with_training_data(TrainedOn(record.classes, record.data))
    found = content["state"]["model"]
    if recipe.lora is not None:
        found = merged_state(found, LoraOptions(**recipe.lora.model_dump()), uri)
        recipe = recipe.model_copy(update={"lora": None})
    with torch.device("meta"):  # a hostile recipe may ask for more memory than its tensors have
        compare_tensors(build_model(recipe).state_dict(), found, uri)
    model = build_model(recipe)
    model.load_state_dict(found)
    if model.reference is not None:
        model.reference.missing = (
            f"{uri} has no tensors of its reference, only their hash. Open it beside the run's "
            "training, or make a model with PretrainModel(…, reference=…)."
        )
    if weights == "teacher":
        _take_teacher(model, uri)
    return model.eval(), recipe


def _take_teacher(model: PretrainModel, name: str) -> None:
    """Load the teacher's weights into every trained module that has a teacher."""
    if model.teacher is None:
        raise UserError(
            f"{name} was trained without a teacher; leave out --weights teacher (the algorithm "
            "ema_teacher keeps one)"
        )
    for student, teacher in model.teachers.pairs:
        student.load_state_dict(teacher.state_dict())
