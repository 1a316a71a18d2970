"""A recipe's training step over fake tensors: shapes and operators without memory or arithmetic.

The fake tensors are on the CPU. A GPU's step has the same operators and sizes: attention is fused
on both, and autocast casts the same products.
"""

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from pospre.batch import Batch, image_key, without_images
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.planning.kernels import StepTrace
from pospre.recipe.recipe import Recipe
from pospre.training.build import attached_model, build_algorithms
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.resolve import resolve

_AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
_CLASSES = [str(number) for number in range(1000)]  # ImageNet's, where the recipe leaves it open


class FakeTraining:
    """A recipe's model, algorithms and optimiser with fake tensors.

    Args:
        recipe: what would be trained; its data need not exist.

    Attributes:
        mode: the fake mode; all work on this object runs inside of it.
        model: with the algorithms attached, in training.
        optimizer: over the trained parameters.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = with_classes(resolve(recipe))
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.algorithms = build_algorithms(self.recipe)
        with torch.device("meta"):
            self.model = attached_model(self.recipe, self.algorithms)
        with self.mode:
            self.model.to_empty(device="cpu").train()
            self.optimizer = build_optimizer(
                self.model, recipe.optimizer, batch_size=recipe.data.batch_size
            )

    def batch(self, size: int) -> Batch:
        """Return a fake batch of ``size`` samples with all views and the algorithms' draws."""
        views = self.model.views
        batch = without_images(size, {name: group.count for name, group in views.items()})
        images = {
            image_key(name): (size, group.count, self.model.encoder.channels, *group.shape)
            for name, group in views.items()
        }
        with self.mode:
            for key, shape in images.items():
                batch[key] = torch.empty(shape, dtype=torch.uint8)
        for algorithm in self.algorithms:
            self._write(algorithm, batch)
        fake = self.mode
        return {k: v if fake.is_our_fake(v) else fake.from_tensor(v) for k, v in batch.items()}

    def _write(self, algorithm: PretrainAlgorithm, batch: Batch) -> None:
        """Let an algorithm draw; with real tensors if its shapes depend on the draws."""
        written = dict(batch)
        try:
            with self.mode:
                algorithm.write(written, self.model)
        except (DataDependentOutputException, DynamicOutputShapeException):
            written = dict(batch)
            algorithm.write(written, self.model)
        batch.update(written)

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

    def step(self, batch: Batch) -> None:
        """Run a whole training step: gradients, optimiser, teacher."""
        self.forward_backward(batch)
        self.update()

    def begin(self) -> None:
        """Run a step, so that the optimiser has its state; no gradients are left."""
        self.step(self.batch(2))
        with self.mode:
            self.optimizer.zero_grad()

    def update(self) -> None:
        """Run the part of a step after the gradients: the optimiser, then the teacher."""
        with self.mode:
            self.optimizer.step()
            self.model.after_step(0.5)


def trace_step(training: FakeTraining, batch: Batch) -> tuple[StepTrace, StepTrace]:
    """Return the operators of a training step: (forward and backward, the update).

    The optimiser has its state; there are no gradients yet.
    """
    with StepTrace() as work:
        training.forward_backward(batch)
    with StepTrace() as update:
        training.update()
    return work, update


def with_classes(recipe: Recipe) -> Recipe:
    """Return the recipe with ImageNet's number of classes if only the data could tell it."""
    algorithms: dict[str, Any] = dict(recipe.algorithms)
    for name, given in algorithms.items():
        with suppress(UserError):  # it says how many
            kind = algorithm_class(name)
            algorithms[name] = kind.for_classes(given, _CLASSES, recipe.data.path)
    return recipe.model_copy(update={"algorithms": algorithms})
