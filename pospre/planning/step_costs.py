"""FLOPs, bytes and memory of a recipe's training step.

The step is traced over fake tensors, which have shapes but no memory or arithmetic, with two sizes
of a microbatch: bytes and FLOPs grow linearly with the samples. The fake tensors are on the CPU. A
GPU's step has the same operators and sizes: attention is fused on both, and autocast casts the same
products.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pospre.batch import Batch, image_key, without_images
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.prepare import write_keys
from pospre.planning.kernels import Kernel, StepTrace, count_flops, fused, tensors
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_stage
from pospre.training.data import build_views
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.resolve import resolve, with_classes
from pospre.training.stages import build_stages

_AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
_CLASSES = [str(number) for number in range(1000)]  # ImageNet's, where the recipe leaves it open
SMALL, LARGE = 8, 16  # microbatches that are tracked


class FakeTraining:
    """A recipe's model, algorithms and optimiser with fake tensors; its data need not exist.

    Attributes:
        mode: the fake mode; all work on this object runs inside of it.
        model: with the algorithms attached, in training.
        optimizer: over the trained parameters.
        stages: of the recipe; None: it has none.
        stage: the number of the stage that is counted.

    Args:
        recipe: to count.
        steps_per_epoch: of its data.
        stage: what trains, and the sizes of views, are those of this stage; None: of the one with
            the most pixels; of several, the one in which most trains.
    """

    def __init__(
        self, recipe: Recipe, steps_per_epoch: int = 1000, stage: int | None = None
    ) -> None:
        self.recipe = with_imagenet_classes(resolve(recipe))
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        among = largest_stages(self.recipe) if stage is None else [stage]
        with torch.device("meta"):
            self.model = build_stage(self.recipe, among[0])
        self.stages = build_stages(self.model, self.recipe, steps_per_epoch)
        with self.mode:
            self.model.to_empty(device="cpu").train()
            self.optimizer = build_optimizer(
                self.model, recipe.optimizer, batch_size=recipe.data.batch_size
            )
        self.stage = 0
        if self.stages is not None:
            self.stage = max(among, key=self.stages.size)
            self.stages.freeze(self.model, self.stage)

    def batch(self, size: int) -> Batch:
        """Return a fake batch of ``size`` samples with all views and the algorithms' draws."""
        views, fake = self.model.views, self.mode
        batch = without_images(size, {name: group.count for name, group in views.items()})
        for name, group in views.items():
            with fake:
                shape = (size, group.count, self.model.encoder.channels, *group.shape)
                batch[image_key(name)] = torch.empty(shape, dtype=torch.uint8)
        for name in self.model.layout.methods:
            written = dict(batch)
            try:
                with fake:
                    write_keys(self.model, self.model.layout, name, written)
            except (DataDependentOutputException, DynamicOutputShapeException):
                written = dict(batch)  # real tensors: its shapes depend on its draws
                write_keys(self.model, self.model.layout, name, written)
            batch.update(written)
        return {k: v if fake.is_our_fake(v) else fake.from_tensor(v) for k, v in batch.items()}

    def autocast(self) -> AbstractContextManager[None]:
        """Return the recipe's mixed precision."""
        dtype = _AUTOCAST.get(self.recipe.trainer.precision)
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    def forward_backward(self, batch: Batch) -> None:
        """Run forward and backward of a microbatch."""
        with self.mode:
            with self.autocast():
                loss = self.model.loss(self.model(batch), batch)["total"]
            loss.backward()

    def update(self) -> None:
        """Run the part of a step after the gradients: the optimiser, then the teacher."""
        with self.mode:
            self.optimizer.step()
            self.model.after_step(0.5)

    def begin(self) -> None:
        """Run a step, so that the optimiser has its state; no gradients are left."""
        self.forward_backward(self.batch(SMALL))  # SIGReg refuses fewer than three
        self.update()
        with self.mode:
            self.optimizer.zero_grad()

    def track(self, batch: Batch) -> tuple[dict[int, int], StepTrace, StepTrace]:
        """Return ``Alive.working`` of a step, and its operators: of (both passes, the update).

        The optimiser has its state; there are no gradients yet.
        """
        state = [one for each in self.optimizer.state.values() for one in each.values()]
        known = [*self.model.buffers(), *state, *batch.values()]
        with Alive(self.model.parameters(), known) as tracker:
            with StepTrace() as work:
                self.forward_backward(batch)
            with StepTrace() as update:
                self.update()
        self.optimizer.zero_grad()
        return tracker.working, work, update


class Alive(TorchDispatchMode):
    """Tracks every storage that is made inside, until it is freed.

    torch's own ``MemTracker`` (2.7) hooks the gradient of every parameter, and so refuses frozen
    ones, which teachers have.

    Attributes:
        working: the most bytes of what was made inside, without the gradients of the parameters,
            by the bytes of such gradients that exist.
    """

    def __init__(self, parameters: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        super().__init__()
        self.working: dict[int, int] = {}
        self._alive = self._gradients = 0
        self._known, parameters = WeakIdKeyDictionary(), list(parameters)
        for tensor in (*parameters, *others):  # made before
            self._known[tensor.untyped_storage()] = True
        trained = [one for one in parameters if one.requires_grad]
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._note_gradient) for one in trained
        ]
        self._seen: set[int] = set()

    def __exit__(self, *error: Any) -> None:
        """Remove the hooks from the parameters."""
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and note its results."""
        made = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors(made)):
            if storage not in self._known:
                self._known[storage] = True
                self._alive += storage.nbytes()
                weakref.finalize(storage, partial(self._forget, storage.nbytes()))
        now = self._alive - self._gradients
        self.working[self._gradients] = max(now, self.working.get(self._gradients, 0))
        return made

    def _forget(self, size: int) -> None:
        self._alive -= size

    def _note_gradient(self, parameter: Tensor) -> None:
        if id(parameter) not in self._seen and parameter.grad is not None:
            self._seen.add(id(parameter))
            self._gradients += parameter.grad.nbytes


def largest_stages(recipe: Recipe) -> list[int]:
    """Return the stages whose views have the most pixels, all of the same sizes; [0] without."""
    stages = recipe.stages
    pixels = [num_pixels(build_views(recipe.in_stage(number))) for number in range(len(stages))]
    first = pixels.index(max(pixels)) if stages else 0
    return [n for n, each in enumerate(stages) if each.sizes == stages[first].sizes] or [0]


def num_pixels(views: Mapping[str, ViewGroup]) -> int:
    """Return the pixels of a sample's views."""
    return sum(group.count * math.prod(group.shape) for group in views.values())


def with_imagenet_classes(recipe: Recipe) -> Recipe:
    """Return the recipe with ImageNet's number of classes if only the data could tell it."""
    algorithms: dict[str, Any] = dict(recipe.algorithms)
    for name, given in algorithms.items():
        with suppress(UserError):  # it says how many
            algorithms[name] = with_classes(name, given, _CLASSES, recipe.data.path)
        if algorithms[name].get("num_images", 0) is None:
            algorithms[name] = {**algorithms[name], "num_images": len(_CLASSES)}
    return recipe.model_copy(update={"algorithms": algorithms})


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step on one GPU without weights and optimiser, by the size of the microbatch."""

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
    small: list[Kernel]  # of forward and backward over SMALL samples
    large: list[Kernel]  # the same kernels over LARGE samples
    update: list[Kernel]  # of optimiser and teacher

    def work(self, samples: int) -> list[Kernel]:
        """Return the kernels of forward and backward over this number of samples."""
        share = (samples - SMALL) / (LARGE - SMALL)
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


def count_passes(model: PretrainModel, batch: Batch) -> dict[str, PassCounts]:
    """Return the encoder's passes over a prepared batch."""
    passes = {}
    for name, declared in model.layout.passes.items():
        views = model.pass_images(declared, batch)
        seen = {**batch, f"{declared.group}/pixels": views}
        flops = count_flops(partial(model.run_pass, name, views, seen)) / LARGE
        number = model.views[declared.group].count
        passes[name] = PassCounts(declared.group, number, declared.count, declared.teacher, flops)
    return passes


def count_step(training: FakeTraining, batches: list[Batch]) -> StepCounts:
    """Return the costs of a step from batches of ``SMALL`` and ``LARGE`` samples."""
    (low, less, _), (high, more, update) = map(training.track, batches)
    # the gradients come in the same order, so each moment of one size has its match in the other
    assert low.keys() == high.keys()
    each = {grads: (high[grads] - low[grads]) / (LARGE - SMALL) for grads in low}
    memory = StepMemory({grads: (low[grads] - each[grads] * SMALL, each[grads]) for grads in low})
    is_eager = training.recipe.trainer.compile is False
    small, large = (one.kernels if is_eager else fused(one.operators) for one in (less, more))
    return StepCounts(more.flops / LARGE, memory, small, large, update.kernels)
