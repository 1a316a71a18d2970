"""What is counted of a recipe: its parameters, passes and steps."""

from collections import Counter
from dataclasses import dataclass

from composer.distributed.fsdp2_utils import generate_composer_model_policy
from torch import nn

from pospre.batch import image_key
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.planning.step_costs import (
    LARGE,
    SMALL,
    FakeTraining,
    PassCounts,
    StepCounts,
    count_passes,
    count_step,
    num_pixels,
)
from pospre.recipe.recipe import Recipe
from pospre.training.scale.blocks import recompute_blocks


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    trained: int
    frozen: int  # of teachers, and fixed tables
    unit: int  # that FSDP2 gathers at once, at most: the blocks in use, and their parents
    unit_trained: int  # the trained ones among them


@dataclass(frozen=True)
class Counts:
    """Everything that is counted."""

    coupled: str
    parts: dict[str, int]  # parameters of encoder, teachers, heads and so on
    parameters: Parameters
    passes: dict[str, PassCounts]  # the encoder's, by name
    steps: dict[bool, StepCounts]  # with and without activation checkpointing
    optimizer_bytes: int
    sample_bytes: int  # of a sample's views, as they are copied to the GPU
    pixels: int  # of a sample's views
    stages: Stages | None = None
    stage: int = 0  # that is counted


def count(recipe: Recipe, steps_per_epoch: int = 1000, stage: int | None = None) -> Counts:
    """Count a recipe in one of its stages, see ``FakeTraining``; its data need not exist."""
    training = FakeTraining(recipe, steps_per_epoch, stage)
    model = training.model
    batches = [training.batch(size) for size in (SMALL, LARGE)]
    training.begin()
    with training.mode, training.autocast():
        passes = count_passes(model, batches[1])
    steps = {False: count_step(training, batches)}
    recompute_blocks(model, offload=False)
    steps[True] = count_step(training, batches)
    state = [value for each in training.optimizer.state.values() for value in each.values()]
    return Counts(
        coupled=training.model.layout.coupled,
        parts=_parts(model),
        parameters=count_parameters(model),
        passes=passes,
        steps=steps,
        optimizer_bytes=sum(value.nbytes for value in state),
        sample_bytes=sum(batches[0][image_key(name)].nbytes for name in model.views) // SMALL,
        pixels=num_pixels(model.views),
        stages=training.stages,
        stage=training.stage,
    )


def _parts(model: PretrainModel) -> dict[str, int]:
    """Return the number of parameters of each part."""

    def numel(*modules: nn.Module, trained: bool = True) -> int:
        every = (one for module in modules for one in module.parameters())
        return sum(one.numel() for one in every if one.requires_grad is trained)

    teachers = [] if model.teacher is None else [model.teacher]
    references = [] if model.reference is None else [model.reference]
    parts = {
        "encoder": numel(model.encoder),
        **{f"head of {name}": numel(model.objectives[name]) for name in model.objectives},
        "tokens and positions": numel(model.contents, model.places),
        "teachers": numel(*teachers, model.objectives, trained=False),
        "reference": numel(*references, trained=False),
    }
    return {name: number for name, number in parts.items() if number}


def count_parameters(model: PretrainModel) -> Parameters:
    """Return the numbers of parameters, including those that FSDP2 gathers at once."""
    units = generate_composer_model_policy(model)._run_policy(model, set(), {})
    names = [name for name, module in model.named_modules() if module in units]
    own = {name: Counter[bool]() for name in names}  # those in no smaller unit, by requires_grad
    every = Counter[bool]()
    for name, one in model.named_parameters():
        every[one.requires_grad] += one.numel()
        around = [unit for unit in names if name.startswith(f"{unit}.")]
        if around:
            own[max(around, key=len)][one.requires_grad] += one.numel()
    # a unit is gathered with its parents
    gathered = [
        sum((own[outer] for outer in names if f"{unit}.".startswith(f"{outer}.")), Counter[bool]())
        for unit in names
    ]
    return Parameters(
        trained=every[True],
        frozen=every[False],
        unit=max(counts.total() for counts in gathered),
        unit_trained=max(counts[True] for counts in gathered),
    )
