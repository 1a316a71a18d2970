"""Counts a recipe's parameters, FLOPs and bytes once, for any number of GPUs.

The memory of a step is what is alive at each moment, followed over fake tensors. torch's own
``MemTracker`` (2.7) hooks the gradient of every parameter, and so refuses frozen ones, which
teachers have.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pospre.batch import Batch, image_key
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.planning.fake import FakeTraining, trace_step
from pospre.planning.fusion import fused
from pospre.planning.kernels import Kernel, StepTrace, count_flops, tensors
from pospre.planning.layouts import Parameters, StepMemory, count_parameters
from pospre.recipe.recipe import Recipe
from pospre.training.scale.blocks import recompute_blocks

_SIZES = 8, 16  # microbatches that are tracked; bytes grow linearly with them


@dataclass(frozen=True)
class KernelLines:
    """Kernels of a step over any number of samples, interpolated from two numbers of samples.

    Bytes and FLOPs of every kernel grow linearly with the samples.

    Attributes:
        small: a number of samples, and the kernels over them.
        large: a larger number, and the same kernels over them.
    """

    small: tuple[int, list[Kernel]]
    large: tuple[int, list[Kernel]]

    def at(self, samples: int) -> list[Kernel]:
        """Return the kernels over this number of samples."""
        (small, low), (large, high) = self.small, self.large
        share = (samples - small) / (large - small)
        return [
            Kernel(
                round(one.bytes + share * (other.bytes - one.bytes)),
                round(one.flops + share * (other.flops - one.flops)),
                one.is_fp32,
            )
            for one, other in zip(low, high, strict=True)
        ]


@dataclass(frozen=True)
class StepCounts:
    """Forward and backward with or without activation checkpointing.

    Attributes:
        flops: per image, including recomputation.
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
        """Return the counts as plain values."""
        return {
            "parameters": self.parts,
            "passes": {name: asdict(one) for name, one in self.passes.items()},
            "flops_per_image": self.steps[False].flops,
            "flops_per_image_with_checkpointing": self.steps[True].flops,
            "optimizer_bytes": self.optimizer_bytes,
            "sample_bytes": self.sample_bytes,
        }


def count(recipe: Recipe) -> Counts:
    """Count a recipe; its data need not exist."""
    training = FakeTraining(recipe)
    model, (small, large) = training.model, _SIZES
    batches = [training.batch(size) for size in _SIZES]
    training.begin()
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
        KernelLines((small, _kernels(training, less)), (large, _kernels(training, more))),
        update.kernels,
    )


def _kernels(training: FakeTraining, trace: StepTrace) -> list[Kernel]:
    """Return the kernels of a GPU's step: compiled, unless ``trainer.compile`` is false."""
    is_eager = training.recipe.trainer.compile is False
    return trace.kernels if is_eager else fused(trace.operators)


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


class Alive(TorchDispatchMode):
    """Tracks every storage that is made inside, until it is freed.

    Args:
        parameters: their gradients are counted apart from everything else.

    Attributes:
        working: the most bytes of anything else that was made inside, by the bytes of gradients
            that exist.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.working: dict[int, int] = {}
        self._alive = self._gradients = 0
        self._known = WeakIdKeyDictionary()
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._note_gradient)
            for one in parameters
            if one.requires_grad
        ]
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and note its results."""
        made = func(*args, **(kwargs or {}))
        for tensor in tensors(made):
            self._note(tensor.untyped_storage())
        now = self._alive - self._gradients
        self.working[self._gradients] = max(now, self.working.get(self._gradients, 0))
        return made

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def know(self, *tensors: Tensor) -> None:
        """Leave these tensors out of the count."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = True

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known[storage] = True
            self._alive += storage.nbytes()
            weakref.finalize(storage, partial(self._forget, storage.nbytes()))

    def _forget(self, size: int) -> None:
        self._alive -= size

    def _note_gradient(self, parameter: Tensor) -> None:
        if id(parameter) not in self._seen and parameter.grad is not None:
            self._seen.add(id(parameter))
            self._gradients += parameter.grad.nbytes


def track_step(training: FakeTraining, batch: Batch) -> tuple[dict[int, int], StepTrace, StepTrace]:
    """Return ``Alive.working`` of a step, and what ``trace_step`` returns of it."""
    training.optimizer.zero_grad()
    state = [one for each in training.optimizer.state.values() for one in each.values()]
    tracker = Alive(list(training.model.parameters()))
    tracker.know(*training.model.parameters(), *training.model.buffers(), *state, *batch.values())
    with tracker:
        work, update = trace_step(training, batch)
    tracker.close()
    training.optimizer.zero_grad()
    return tracker.working, work, update


def pass_flops(model: PretrainModel, batch: Batch) -> dict[str, int]:
    """Return the forward FLOPs of each encoder pass over a prepared batch, by name."""
    counts = {}
    for name, declared in model.registry.passes.items():
        views = model.images(batch, declared.group)
        seen = {**batch, f"{declared.group}/pixels": views}
        counts[name] = count_flops(partial(model.encode, name, views, seen))
    return counts
