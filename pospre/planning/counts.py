"""What a recipe is made of, counted once and whatever the GPUs: parameters, FLOPs, bytes."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from pospre.batch import Batch, image_key
from pospre.model.algorithm import PretrainAlgorithm
from pospre.planning.fake import FakeTraining
from pospre.planning.flops import count_flops, pass_flops
from pospre.planning.layouts import Parameters, count_parameters
from pospre.planning.memory import StepMemory, track_step
from pospre.planning.traffic import Kernel, KernelLines
from pospre.recipe.recipe import Recipe
from pospre.training.scale.blocks import recompute_blocks

_SIZES = 8, 16  # microbatches that are tracked; bytes grow linearly with them


@dataclass(frozen=True)
class StepCounts:
    """Forward and backward with or without activation checkpointing.

    Attributes:
        flops: per image, with what is computed again.
        memory: by microbatch.
        work: the kernels of forward and backward, by microbatch.
        update: the kernels of optimiser and teacher.
    """

    flops: float
    memory: StepMemory
    work: KernelLines
    update: list[Kernel]


@dataclass(frozen=True)
class PassCounts:
    """One encoder pass: its group of views, their number, tokens of each, forward FLOPs."""

    group: str
    views: int
    patches: int | None
    teacher: bool
    flops: float


@dataclass(frozen=True)
class Counts:
    """Everything that is counted.

    Attributes:
        algorithms: that were counted.
        parts: parameters by part: encoder, teachers, heads and so on.
        parameters: in all.
        passes: the encoder's, by name.
        steps: with and without activation checkpointing.
        optimizer_bytes: of the optimiser's state.
        sample_bytes: of a sample's views, as they are copied to the GPU.
        pixels: of a sample's views.
    """

    algorithms: list[PretrainAlgorithm]
    parts: dict[str, int]
    parameters: Parameters
    passes: dict[str, PassCounts]
    steps: dict[bool, StepCounts]
    optimizer_bytes: int
    sample_bytes: int
    pixels: int

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "parameters": self.parts,
            "passes": {name: asdict(one) for name, one in self.passes.items()},
            "flops_per_image": self.steps[False].flops,
            "flops_per_image_with_checkpointing": self.steps[True].flops,
            "optimizer_bytes": self.optimizer_bytes,
            "sample_bytes": self.sample_bytes,
        }


def count(recipe: Recipe) -> Counts:
    """Return what a recipe is made of; its data need not be there."""
    training = FakeTraining(recipe)
    model, (small, large) = training.model, _SIZES
    batches = [training.batch(size) for size in _SIZES]
    training.step(batches[0])  # makes the optimiser's state
    passes = {}
    with training.mode, training.autocast():
        flops = pass_flops(model, batches[1])
    for name, declared in model.registry.passes.items():
        views = model.views[declared.group].count
        passes[name] = PassCounts(
            declared.group, views, declared.count, declared.teacher, flops[name] / large
        )
    steps = {False: _step(training, batches)}
    recompute_blocks(model, offload=False)
    steps[True] = _step(training, batches)
    state = [value for each in training.optimizer.state.values() for value in each.values()]
    groups = model.views.values()
    return Counts(
        algorithms=training.algorithms,
        parts=_parts(training),
        parameters=count_parameters(model),
        passes=passes,
        steps=steps,
        optimizer_bytes=sum(value.nbytes for value in state),
        sample_bytes=sum(batches[0][image_key(name)].nbytes for name in model.views) // small,
        pixels=sum(group.count * math.prod(group.shape) for group in groups),
    )


def flops_per_image(recipe: Recipe) -> float:
    """Return the FLOPs of forward and backward of one image."""
    training, size = FakeTraining(recipe), _SIZES[1]
    batch = training.batch(size)
    return count_flops(lambda: training.forward_backward(batch)) / size


def _step(training: FakeTraining, batches: list[Batch]) -> StepCounts:
    small, large = _SIZES
    low, less, _ = track_step(training, batches[0])
    high, more, update = track_step(training, batches[1])
    return StepCounts(
        more.flops / large,
        StepMemory.from_sizes({small: low, large: high}),
        KernelLines((small, less.kernels), (large, more.kernels)),
        update.kernels,
    )


def _parts(training: FakeTraining) -> dict[str, int]:
    """Return the number of parameters of each part."""
    model = training.model

    def trained(*modules: nn.Module, wanted: bool = True) -> int:
        every = (one for module in modules for one in module.parameters())
        return sum(one.numel() for one in every if one.requires_grad is wanted)

    editors = trained(model.contents, model.places)
    heads = {f"head of {name}": trained(model.objectives[name]) for name in model.objectives}
    teachers = [] if model.teacher is None else [model.teacher]
    frozen = trained(*teachers, model.objectives, wanted=False)
    parts = {"encoder": trained(model.encoder), **heads, "tokens and positions": editors}
    return {name: number for name, number in {**parts, "teachers": frozen}.items() if number}
