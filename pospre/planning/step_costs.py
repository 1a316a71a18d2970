"""Counts a recipe's parameters, FLOPs and bytes once, for any number of GPUs.

A step is traced over two sizes of a microbatch. Its bytes and FLOPs grow linearly with the samples.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial

from composer.distributed.fsdp2_utils import generate_composer_model_policy
from torch import nn

from pospre.batch import Batch, image_key
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.planning.fake import FakeTraining
from pospre.planning.kernels import Kernel, count_flops, fused
from pospre.recipe.recipe import Recipe
from pospre.training.scale.blocks import recompute_blocks

_SMALL, _LARGE = 8, 16  # microbatches that are tracked


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step on one GPU beside weights and optimiser, by the size of the microbatch."""

    # by bytes of gradients that exist: (bytes for any microbatch, bytes that each sample adds)
    moments: dict[int, tuple[float, float]]

    def working(self, microbatch: int, grad_share: float, *, accumulates: bool) -> float:
        """Return the most bytes of activations, buffers and a GPU's share of the gradients.

        ``accumulates``: gradients of earlier microbatches exist from the beginning.
        """
        full = max(self.moments)
        return max(
            fixed + each * microbatch + grad_share * (full if accumulates else grads)
            for grads, (fixed, each) in self.moments.items()
        )


@dataclass(frozen=True)
class StepCounts:
    """Forward and backward with or without activation checkpointing."""

    flops: float  # per image, including recomputation
    memory: StepMemory
    small: list[Kernel]  # of forward and backward over _SMALL samples
    large: list[Kernel]  # the same kernels over _LARGE samples
    update: list[Kernel]  # of optimiser and teacher

    def work(self, samples: int) -> list[Kernel]:
        """Return the kernels of forward and backward over this number of samples."""
        share = (samples - _SMALL) / (_LARGE - _SMALL)
        return [
            Kernel(
                round(one.bytes + share * (other.bytes - one.bytes)),
                round(one.flops + share * (other.flops - one.flops)),
                one.is_fp32,
            )
            for one, other in zip(self.small, self.large, strict=True)
        ]


@dataclass(frozen=True)
class PassCounts:
    """One encoder pass: its group of views, their number, tokens of each, forward FLOPs."""

    group: str
    views: int
    patches: int | None
    teacher: bool
    flops: float


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

    algorithms: list[PretrainAlgorithm]
    parts: dict[str, int]  # parameters of encoder, teachers, heads and so on
    parameters: Parameters
    passes: dict[str, PassCounts]  # the encoder's, by name
    steps: dict[bool, StepCounts]  # with and without activation checkpointing
    optimizer_bytes: int
    sample_bytes: int  # of a sample's views, as they are copied to the GPU
    pixels: int  # of a sample's views


def count(recipe: Recipe) -> Counts:
    """Count a recipe; its data need not exist."""
    training = FakeTraining(recipe)
    model = training.model
    batches = [training.batch(size) for size in (_SMALL, _LARGE)]
    training.begin()
    with training.mode, training.autocast():
        passes = _passes(model, batches[1])
    steps = {False: _step(training, batches)}
    recompute_blocks(model, offload=False)
    steps[True] = _step(training, batches)
    state = [value for each in training.optimizer.state.values() for value in each.values()]
    return Counts(
        algorithms=training.algorithms,
        parts=_parts(model),
        parameters=count_parameters(model),
        passes=passes,
        steps=steps,
        optimizer_bytes=sum(value.nbytes for value in state),
        sample_bytes=sum(batches[0][image_key(name)].nbytes for name in model.views) // _SMALL,
        pixels=sum(group.count * math.prod(group.shape) for group in model.views.values()),
    )


def _passes(model: PretrainModel, batch: Batch) -> dict[str, PassCounts]:
    """Return the encoder's passes over a prepared batch."""
    passes = {}
    for name, declared in model.registry.passes.items():
        views = model.images(batch, declared.group)
        seen = {**batch, f"{declared.group}/pixels": views}
        flops = count_flops(partial(model.run_pass, name, views, seen)) / _LARGE
        number = model.views[declared.group].count
        passes[name] = PassCounts(declared.group, number, declared.count, declared.teacher, flops)
    return passes


def _step(training: FakeTraining, batches: list[Batch]) -> StepCounts:
    (low, less, _), (high, more, update) = map(training.track, batches)
    # the gradients come in the same order, so each moment of one size has its match in the other
    assert low.keys() == high.keys()
    each = {grads: (high[grads] - low[grads]) / (_LARGE - _SMALL) for grads in low}
    memory = StepMemory({grads: (low[grads] - each[grads] * _SMALL, each[grads]) for grads in low})
    is_eager = training.recipe.trainer.compile is False
    small, large = (one.kernels if is_eager else fused(one.operators) for one in (less, more))
    return StepCounts(more.flops / _LARGE, memory, small, large, update.kernels)


def _parts(model: PretrainModel) -> dict[str, int]:
    """Return the number of parameters of each part."""

    def numel(*modules: nn.Module, trained: bool = True) -> int:
        every = (one for module in modules for one in module.parameters())
        return sum(one.numel() for one in every if one.requires_grad is trained)

    teachers = [] if model.teacher is None else [model.teacher]
    parts = {
        "encoder": numel(model.encoder),
        **{f"head of {name}": numel(model.objectives[name]) for name in model.objectives},
        "tokens and positions": numel(model.contents, model.places),
        "teachers": numel(*teachers, model.objectives, trained=False),
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
