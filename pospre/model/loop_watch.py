"""What a training loop without Composer has done with a model, to notice its mistakes.

Weights are read only in the first steps, because on a GPU that synchronises.
"""

import warnings
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from pospre.errors import UserError
from pospre.model.layout import Layout
from pospre.model.optimizer_checks import (
    Trained,
    left_out,
    optimizers_of,
    refuse_untrained,
    unfrozen,
)
from pospre.model.sample_numbers import SampleNumbers
from pospre.model.teacher import TeacherManager, local
from pospre.nn.lora import adapted

_UNCALLED = 3
"""Changes of the weights without ``after_step``; loading weights also changes them, but once."""
_CALLS = 12
"""Calls of ``after_step`` that are compared with the changes of the weights."""
_GIVEN_UP = 64
"""Calls after which weights that never change are no longer compared."""
_CONSTANT = 1000
"""Calls with the same progress: more than the microbatches of a step."""
_BETWEEN = 64
"""Steps between checks of the optimisers: a walk over all parameters takes about 1 ms."""


class Watched(Trained, Protocol):
    """What is read of a ``PretrainModel`` in a loop."""

    training: bool
    layout: Layout
    teachers: TeacherManager

    @property
    def encoder(self) -> nn.Module:
        """The trained encoder."""

    def check_trainable(self) -> None:
        """Raise ``UserError`` if it has no loss."""


class LoopWatch:
    """The steps of a loop, as ``prepare`` and ``after_step`` see them; copies start anew.

    Attributes:
        numbers: the samples' indices and epochs.
        is_new: no batch is prepared yet, or Composer prepares them.
    """

    def __init__(self) -> None:
        self.numbers = SampleNumbers()
        self.is_new = True
        self._has_started = False
        self._said: set[str] = set()
        self._prepared, self._called = _Progress("model(batch, …)"), _Progress("after_step")
        self._optimizers: WeakSet[Optimizer] | None = None  # None: not looked for yet
        self._is_settled = False  # the weights need not be read any more
        self._weights: tuple[int, float] | None = None  # as last read
        self._called_last = False  # after_step, not prepare
        self._has_stepped_before = False  # the first call: so the next batch is prepared early
        self._followed = self._ahead = self._unfollowed = self._idle = 0  # see _judge
        self._in_training = self._in_eval = False  # modes of the batches of this step
        self._steps_in_eval = 0
        self._has_warned_of_progress = False

    def __reduce__(self) -> tuple[type["LoopWatch"], tuple[()]]:
        return LoopWatch, ()

    def start(self, model: Watched) -> None:
        """Check the model before the first batch of a loop or of a Trainer."""
        model.check_trainable()
        inside, encoder = model.layout.encoder, model.encoder
        if encoder is not inside and all(part is not inside for part in encoder.modules()):
            raise UserError(
                "model.encoder was replaced after the model was made; its algorithms and the "
                "teacher still use the old one. Make a new model: pospre.PretrainModel(encoder, "
                "algorithms, seed=…)."
            )
        for layer in adapted(inside):
            if layer.weight.requires_grad:
                raise UserError(
                    "a weight of the encoder has LoRA pairs, and is trained itself. Freeze it: "
                    "pospre.add_lora does; or merge the pairs first: pospre.merge_lora(encoder)."
                )
        is_first, self._has_started = not self._has_started, True
        if is_first and inside.copied_from.has_changed():
            self.warn(
                "the timm model has changed since it was copied; the copy, model.encoder, is "
                "trained without these changes. Change the timm model before you pass it, or "
                "change model.encoder."
            )
        if model.teachers.catch_up():
            self.warn(
                f"the weights have changed since the teacher of algorithms.{model.teachers.owner} "
                "was copied from them; it starts from the new ones."
            )

    def begin(self, model: Watched, progress: float) -> None:
        """Note a batch; ``UserError`` if weights change, but ``after_step`` is never called."""
        if self.is_new:
            self.start(model)
            self.is_new = False
        if self._called.calls:
            if not self._is_settled and self._called_last:
                self._ahead += self._has_changed(model)
            self._called_last = False
        elif not self._is_settled:
            self._check_followed(model)
        if not model.training:
            self._in_eval = True
            return
        self._in_training = True
        self._look(self._prepared, progress)
        if not self._called.calls and self._prepared.calls % _BETWEEN == 0:
            self._check_optimizers(model)

    def end(self, model: Watched, progress: float) -> None:
        """Note a call of ``after_step``; ``UserError`` if there are more than optimiser steps."""
        if self.is_new:
            return
        self._look(self._called, progress)
        self._check_mode()
        if self._called.calls % _BETWEEN == 1:
            self._check_optimizers(model)
        if model.teachers.momentum is None or isinstance(model, FSDPModule):
            self._is_settled = True  # nothing follows, or some weights are whole in a forward only
        if not self._is_settled:
            self._called_last = True
            if self._called.calls == 1:
                self._has_stepped_before = self._ahead > 0
            self._judge(self._has_changed(model))

    def warn(self, text: str) -> None:
        """Give a warning once."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=4)

    def _look(self, progress: "_Progress", given: float) -> None:
        fault = progress.look(given, self.numbers.num_epochs)
        if fault is not None and not self._has_warned_of_progress:
            self._has_warned_of_progress = True
            self.warn(
                f"the progress given to {progress.function} {fault}. Give the completed share of "
                "the whole training: (epoch + step / len(loader)) / epochs. Schedules follow it, "
                "such as the momentum of a teacher."
            )

    def _check_mode(self) -> None:
        """After an optimiser step: warn if the batches of two steps were all in eval mode."""
        self._steps_in_eval += self._in_eval and not self._in_training
        self._in_training = self._in_eval = False
        if self._steps_in_eval >= 2:
            self.warn(
                "the model is trained in eval mode: without augmentation, drop path, and checks "
                "of the samples. Call model.train() before the loop, and after evaluations; "
                "load_run returns a model in eval mode."
            )

    def _check_followed(self, model: Watched) -> None:
        """Raise ``UserError`` if the weights have changed, but a teacher has not."""
        if self._has_changed(model):
            self._ahead += 1
            self._check_mode()
        if self._ahead < _UNCALLED:
            return
        self._check_optimizers(model)
        if model.teachers.momentum is not None:
            raise UserError(
                f"algorithms.{model.teachers.owner} has a teacher that is never updated: the "
                "optimiser has changed the weights three times without a call of "
                "model.after_step(progress). Call it after each optimiser step."
            )
        self._is_settled = True  # no teacher to update

    def _judge(self, has_changed: bool) -> None:
        """Compare the calls of ``after_step`` with the changes of the weights.

        They change before a call (``followed``) or between it and the next batch (``ahead``); or
        not since the call before (``unfollowed``), as when a loss scaler has skipped a step.
        """
        self._followed += has_changed
        changes = self._followed + self._ahead
        if changes == 0:  # skipped steps, or a learning rate of 0
            self._idle += 1
            self._is_settled = self._idle == _GIVEN_UP
            return
        self._unfollowed += not has_changed
        calls = self._followed + self._unfollowed
        if calls < _CALLS:
            return
        self._is_settled = True
        if calls > 1.5 * changes:
            raise UserError(
                f"model.after_step was called {calls} times, but the weights have changed "
                f"{changes} times, so the teacher follows too fast. Call it once after each "
                "optimizer.step(), not after each microbatch."
            )
        if self._ahead > self._followed and not self._has_stepped_before:
            self.warn(
                "model.after_step is called before optimizer.step(), so the teacher follows the "
                "weights of the step before. Call it after optimizer.step()."
            )

    def _has_changed(self, model: Watched) -> bool:
        """Return whether the trained weights have changed since the last call."""
        trained = [each for each in model.parameters() if each.requires_grad]
        # fused optimisers do not increase versions, so compare one tensor's values. Their sum would
        # hardly change: beside a LayerNorm, before or after it, a weight's gradients sum to almost
        # 0.
        one: Tensor = max(trained, key=Tensor.numel, default=torch.zeros(()))
        size = torch.linalg.vector_norm(local(one.detach()), 1, dtype=torch.float64)
        before, self._weights = self._weights, (sum(e._version for e in trained), size.item())
        return before is not None and before != self._weights

    def _check_optimizers(self, model: Watched) -> None:
        """Raise ``UserError`` if the optimisers omit a tensor that has a gradient.

        Checking for changed values would not work: early in a long warm-up, the rate is too small
        to change a weight of 1. Optimisers that are not torch's are not found.
        """
        for warning in unfrozen(model.layout, ()):
            self.warn(warning)
        left = left_out(model, self._optimizers or ())
        if self._optimizers is None or (self._optimizers and _with_gradient(left)):
            self._optimizers = WeakSet(optimizers_of(model))  # there may be a new one
            left = left_out(model, self._optimizers)
        if self._optimizers:
            refuse_untrained(_with_gradient(left))


def _with_gradient(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, each in tensors.items() if each.grad is not None]


class _Progress:
    """The progress given to a function of the model, which should rise from 0 to 1."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.calls = 0
        self._first = self._last = 0.0
        self._epochs = 0

    def look(self, given: float, num_epochs: int) -> str | None:
        """Note a value; return what is wrong if it falls, or is the same for long.

        Args:
            given: the progress.
            num_epochs: number of epochs seen before.
        """
        before, self._last = self._last, given
        self.calls += 1
        if self.calls == 1:
            self._first, self._epochs = given, num_epochs
            return None
        if given < before:
            return f"has fallen from {before:.4g} to {given:.4g}"
        is_long = self.calls == _CONSTANT or num_epochs - self._epochs > 2
        return f"is always {given:.4g}" if is_long and given == self._first else None
