"""Builds a recipe's model and the other components of its trainer, or loads a checkpoint's model.

All user mistakes are found here, before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from composer.devices import Device
from torch.optim import Optimizer

from pospre.data.loader import ViewLoader
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.recipe.recipe import Recipe, recorded_recipe
from pospre.run.checkpoints.reading import Checkpoint, open_checkpoint
from pospre.run.device import build_device, decide_precision, set_residual
from pospre.run.resume import compare_tensors, recorded
from pospre.training.data import build_data, build_views
from pospre.training.loggers import check_loggers
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.optimizer.schedule import StepSchedule, build_schedule
from pospre.training.resolve import resolve
from pospre.training.scale.fsdp import num_copies

Weights = Literal["student", "teacher"]


@dataclass(frozen=True)
class Components:
    """The components of a trainer: checked, with nothing written yet."""

    recipe: Recipe
    device: Device
    loader: ViewLoader
    algorithms: list[PretrainAlgorithm]
    model: PretrainModel
    optimizer: Optimizer
    schedule: StepSchedule

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.schedule.total_steps


def build_components(recipe: Recipe, device: Device | None = None) -> Components:
    """Return the recipe, resolved with its data, and its components."""
    check_loggers(recipe)
    device = device or build_device(recipe)
    if recipe.trainer.fsdp is not None:
        num_copies(recipe.trainer.fsdp)  # raises if it does not divide
    loader = build_data(recipe)
    recipe = decide_precision(resolve(recipe, loader.reader), device)
    return make_components(recipe, device, loader)


def make_components(recipe: Recipe, device: Device, loader: ViewLoader) -> Components:
    """Return the components of a resolved recipe, built around an existing loader."""
    algorithms = build_algorithms(recipe)
    model = attached_model(recipe, algorithms)
    batch_size = recipe.data.batch_size
    optimizer = build_optimizer(model, recipe.optimizer, batch_size=batch_size)
    schedule = build_schedule(
        optimizer,
        recipe.schedule,
        rates=recipe.optimizer,
        max_duration=recipe.trainer.max_duration,
        steps_per_epoch=len(loader),
        batch_size=batch_size,
    )
    return Components(recipe, device, loader, algorithms, model, optimizer, schedule)


def build_algorithms(recipe: Recipe) -> list[PretrainAlgorithm]:
    """Return the algorithms of a resolved recipe in the order of attachment: hosts first."""
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
    return sorted(made, key=lambda algorithm: not algorithm.is_host)


def build_model(recipe: Recipe) -> PretrainModel:
    """Return a resolved recipe's model with newly made algorithms attached."""
    return attached_model(recipe, build_algorithms(recipe))


def attached_model(recipe: Recipe, algorithms: Sequence[PretrainAlgorithm]) -> PretrainModel:
    """Return a resolved recipe's model with ``algorithms`` (of ``build_algorithms``) attached.

    The weights are a function of the recipe's seed: the same on every rank and at every start.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = PretrainModel(
            build_encoder(**recipe.encoder.arguments()),
            algorithms,
            seed=recipe.seed,
            views=build_views(recipe),
            mean=recipe.data.mean,
            std=recipe.data.std,
        )
    set_residual(model, recipe)
    return model


def load_model(uri: str, *, weights: Weights = "student") -> tuple[PretrainModel, Recipe]:
    """Return the model of a checkpoint, in eval mode on the CPU, and its recipe.

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
    recipe = resolve(recorded_recipe(recorded(content).recipe, source=f"recipe in {uri}"))
    model = build_model(recipe)
    found = content["state"]["model"]
    compare_tensors(model.state_dict(), found, uri)
    model.load_state_dict(found)
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
