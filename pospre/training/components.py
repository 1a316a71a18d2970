"""From a recipe to what a trainer is made of, in a straight line.

Everything the user can get wrong is found here, before anything is written.
"""

from dataclasses import dataclass

from composer.devices import Device
from torch.optim import Optimizer

from pospre.data.loader import ViewLoader
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe
from pospre.training.build import attached_model, build_algorithms
from pospre.training.data import build_data
from pospre.training.device import build_device, decide_precision
from pospre.training.loggers import check_loggers
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.optimizer.schedule import StepSchedule, build_schedule
from pospre.training.resolve import resolve
from pospre.training.scale.fsdp import num_copies


@dataclass(frozen=True)
class Components:
    """What a trainer is made of: checked, and nothing written yet."""

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


def build_components(recipe: Recipe) -> Components:
    """Return the recipe, resolved with its data, and what it is made of."""
    check_loggers(recipe)
    device = build_device(recipe)
    if recipe.trainer.fsdp is not None:
        num_copies(recipe.trainer.fsdp)  # or an error
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
