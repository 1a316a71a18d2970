"""From a recipe to the components of its trainer, or from a checkpoint to its model.

A recipe is resolved first: every argument is checked and filled in, including those from the data.
All user mistakes are found here, before anything is written.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from composer.devices import Device
from torch import Tensor, nn
from torch.optim import Optimizer

from pospre.arguments import typed
from pospre.command_line import spelled
from pospre.data.loader import ViewLoader
from pospre.data.memory import estimate_memory
from pospre.data.stores.description import TrainedOn
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.nn.build import build_encoder
from pospre.nn.lora import add_lora, merged_state
from pospre.nn.lora_options import LoraOptions
from pospre.nn.positions.fading import settled
from pospre.recipe.recipe import Recipe, recorded_recipe
from pospre.run.checkpoints.reading import Checkpoint, open_checkpoint
from pospre.run.device import build_device
from pospre.run.resume import compare_tensors, recorded
from pospre.training.data import build_data, build_views
from pospre.training.loggers import check_loggers
from pospre.training.optimizer.schedule import StepSchedule
from pospre.training.precision import decide_precision, set_residual
from pospre.training.resolve import resolve
from pospre.training.scale.fsdp import num_copies
from pospre.training.stages import build_rates, build_stages
from pospre.training.weight_files import is_weights_file
from pospre.training.weight_records import Weights
from pospre.trust import trust_classes


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
    stage: int = 0  # whose sizes the views have

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
    loader = build_data(recipe.in_stage(0))
    recipe = decide_precision(resolve(recipe, loader.reader), device)
    parts = make_components(recipe, device, loader, reference)
    for number, (before, stage) in enumerate(pairwise(recipe.stages), 1):
        if before.sizes != stage.sizes:
            _check_sizes(parts, number)
    return parts


def make_components(
    recipe: Recipe,
    device: Device,
    loader: ViewLoader,
    reference: nn.Module | None = None,
    stage: int = 0,
) -> Components:
    """Return the components of a resolved recipe in a stage, built around a loader for it."""
    model = build_stage(recipe, stage, reference)
    stages = build_stages(model, recipe, len(loader))
    rates = build_rates(recipe, loader, model, stages)
    return Components(recipe, device, loader, model, *rates, stages, stage)


def with_sizes(parts: Components, stage: int, reference: nn.Module | None) -> Components:
    """Return new components whose views have the sizes of a stage."""
    loader = parts.loader
    if parts.recipe.stages[stage].sizes != parts.recipe.stages[parts.stage].sizes:
        loader = _resized(loader, parts.recipe.in_stage(stage))
    return make_components(parts.recipe, parts.device, loader, reference, stage)


def in_stages(
    parts: Components, starts: Sequence[int], fresh: Collection[str], step: int
) -> Components:
    """Return components for a run that is at ``step``; see ``Stages``."""
    if parts.stages is None:
        return parts
    stages = parts.stages.resumed(starts, fresh, step)
    now, options = stages.at(step), stages.options
    if options[now].sizes != options[parts.stage].sizes:
        parts = with_sizes(parts, now, parts.model.reference)
        return in_stages(parts, starts, fresh, step)
    optimizer, schedule = build_rates(parts.recipe, parts.loader, parts.model, stages)
    return replace(parts, optimizer=optimizer, schedule=schedule, stages=stages)


def _resized(loader: ViewLoader, recipe: Recipe) -> ViewLoader:
    """Return a loader of the same samples with a recipe's views."""
    views = [*build_views(recipe).values()]
    return replace(loader, path=loader.reader, views=views, label_fraction=1.0, labels=None)


def _check_sizes(parts: Components, stage: int) -> None:
    """Raise ``UserError`` if the views of a later stage do not work, or change a tensor's shape."""
    recipe = parts.recipe
    with torch.device("meta"):
        there = build_stage(recipe, stage).state_dict()
    with _naming_sizes(recipe, stage):
        estimate_memory(_resized(parts.loader, recipe.in_stage(stage))).check()
        for name, tensor in parts.model.state_dict().items():
            if there[name].shape != tensor.shape:
                raise UserError(
                    f"the tensor '{name}' would have the shape {tuple(there[name].shape)} instead "
                    f"of {tuple(tensor.shape)}, as it depends on the number of patches. Leave out "
                    "the size of the views that its method reads"
                )


@contextmanager
def _naming_sizes(recipe: Recipe, stage: int) -> Iterator[None]:
    """Begin the message of a ``UserError`` raised inside with the stage's sizes."""
    try:
        yield
    except UserError as error:
        sizes = spelled(recipe.stages[stage].sizes)
        raise error.restated(f"stages.{stage}.sizes = {sizes}: {error}") from error


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


def build_model(recipe: Recipe, reference: nn.Module | None = None) -> PretrainModel:
    """Return a resolved recipe's model.

    Without its ``reference``, one with random weights and of the shape that the recipe says takes
    its place, or of the encoder's. The weights are a function of the recipe's seed: the same on
    every rank and at every start.
    """
    algorithms = build_algorithms(recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        encoder = build_encoder(**recipe.encoder.arguments())
        frozen = reference
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


def build_stage(recipe: Recipe, stage: int, reference: nn.Module | None = None) -> PretrainModel:
    """Return the model as ``build_model`` does, with views of a stage's sizes."""
    here = recipe.in_stage(stage)
    if not recipe.stages or not recipe.stages[stage].sizes:
        return build_model(here, reference)
    with _naming_sizes(recipe, stage):
        return build_model(here, reference)


def load_model(uri: str, *, weights: Weights = "student") -> tuple[PretrainModel, Recipe]:
    """Return the model of a checkpoint, in eval mode on the CPU, and its recipe.

    Pairs of LoRA are merged into the weights, and the recipe has none. The same holds for positions
    that have faded out.

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
    found = without_pairs(content["state"]["model"], recipe, uri)
    recipe = recipe.without_pairs()
    if recipe.encoder.fades_from is not None and (left := settled(found)) is not None:
        found, alone = left, {"fades_from": None, "keep": None}
        recipe = recipe.with_encoder(recipe.encoder.model_copy(update=alone))
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


def without_pairs(state: dict[str, Tensor], recipe: Recipe, name: str) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint ``name`` with LoRA's products in their weights."""
    if recipe.lora is None:
        return state
    return merged_state(state, LoraOptions(**recipe.lora.model_dump()), name)


def _take_teacher(model: PretrainModel, name: str) -> None:
    """Load the teacher's weights into every trained module that has a teacher."""
    if model.teacher is None:
        raise UserError(
            f"{name} was trained without a teacher; leave out --weights teacher (the algorithm "
            "ema_teacher keeps one)"
        )
    for student, teacher in model.teachers.pairs:
        student.load_state_dict(teacher.state_dict())


@typed
def load_run(address: str | Path, weights: Weights = "student") -> PretrainModel:
    """Return a run's trained model with its algorithms attached, in eval mode on the CPU.

    Args:
        address: a run folder or a folder of checkpoints (the newest intact one counts), or a
            checkpoint; local or ``s3://``.
        weights: ``teacher`` loads the teacher's weights instead of the trained ones.

    Raises:
        UserError: there is none, it is damaged, or has no teacher; or it is a file of weights.
    """
    if is_weights_file(str(address)):
        raise UserError(
            f"load_run takes a run folder or a checkpoint, but {address} is a weight file: "
            "load it into an existing model with pospre.load_weights(model, file)."
        )
    return load_model(str(address), weights=weights)[0]
