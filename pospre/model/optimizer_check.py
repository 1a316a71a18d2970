"""Detect parameters that the optimiser omits or trains too early, with or without a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pospre.errors import UserError

if TYPE_CHECKING:
    from pospre.model.model import PretrainModel

_STEPPED: WeakSet[Optimizer] = WeakSet()


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _STEPPED.add(optimizer)


register_optimizer_step_post_hook(_note_step)


def check_stepped(model: PretrainModel) -> None:
    """Raise ``UserError`` if the optimisers that have stepped omit some tensors.

    Checking for changed values would not work: early in a long warm-up, the rate is too small to
    change a weight of 1. Only tensors with a gradient are checked. Optimisers that are not
    torch's, or whose ``step`` is compiled, are not detected.
    """
    if model.is_checked:
        return
    left = _left_out(model, _STEPPED)
    if len(left) < len([*model.parameters()]):
        model.is_checked = True  # checked once
        _refuse_untrained([name for name, each in left.items() if each.grad is not None])


def check_followed(model: PretrainModel) -> None:
    """Raise ``UserError`` if the weights change every step, but ``after_step`` is never called.

    Without a teacher, ``after_step``'s own check runs here instead. Loading weights also changes
    them, but not three times in a row.
    """
    if model.is_followed or model.is_checked:
        return
    trained = [each for each in model.parameters() if each.requires_grad]
    # fused optimisers do not increase versions, so compare one tensor's values
    one = max(trained, key=torch.Tensor.numel, default=torch.zeros(()))
    seen = sum(each._version for each in trained), one.detach().sum().item()
    if seen != model.seen_weights:
        model.seen_weights = seen
        model.moves_seen += 1
    if model.moves_seen <= 3:  # the first is the initial state
        return
    check_stepped(model)
    if model.teachers.momentum is not None:
        raise UserError(
            f"algorithms.{model.teachers.owner} has a teacher that is never updated: the "
            "optimiser has changed the weights three times without a call of "
            "model.after_step(progress). Call it after each optimiser step."
        )
    model.is_followed = True  # no teacher to update


def check_optimized(model: PretrainModel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if a tensor with a gradient is in no optimiser's group."""
    left = _left_out(model, optimizers)
    _refuse_untrained([name for name, each in left.items() if each.requires_grad])
    _warn_of_unfrozen(model, optimizers)


def _left_out(model: PretrainModel, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors, by name, that are in no group of these optimisers."""
    groups = _groups(optimizers)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return {name: each for name, each in model.named_parameters() if id(each) not in held}


def _groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _warn_of_unfrozen(model: PretrainModel, optimizers: Iterable[Optimizer]) -> None:
    """Warn if parts should be frozen for some epochs, but no optimiser group is ``frozen``."""
    groups = _groups(optimizers)
    for name in model.objectives:
        waiting = [part for part, epochs in model.objectives[name].frozen_epochs.items() if epochs]
        if waiting and not any(group.get("frozen") for group in groups):
            warnings.warn(
                f"algorithms.{name} freezes {', '.join(waiting)} for some epochs. Only "
                "pospre.train's optimiser does this; yours trains them at once. Remove their "
                "gradients in these epochs, or freeze nothing (dinov2: freeze_epochs=0).",
                stacklevel=2,
            )


def _refuse_untrained(left: list[str]) -> None:
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{len(left)} tensors have a gradient, but no optimiser trains them: "
            f"{', '.join(left[:3])}{more}. Attach the algorithms before making the optimiser: "
            "model = pospre.PretrainModel(encoder, [pospre.MAE()], seed=0), and pass "
            "algorithms=model.algorithms to the Trainer. To freeze a tensor, call "
            "requires_grad_(False)."
        )
