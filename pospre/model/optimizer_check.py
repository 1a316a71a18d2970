"""What an optimiser leaves out, or trains too early: under a Trainer, and in a plain loop."""

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
    """Raise ``UserError`` if the optimisers that have made a step leave some tensors out.

    Whether a tensor has moved would not tell: the first rate of a long warm-up is too small for a
    weight of 1. Only tensors that hold a gradient are checked. An optimiser that is none of
    torch's, or whose ``step`` is compiled, is not seen.
    """
    if model.is_checked:
        return
    left = _left_out(model, _STEPPED)
    if len(left) < len([*model.parameters()]):
        model.is_checked = True  # asked once
        _refuse_untrained([name for name, each in left.items() if each.grad is not None])


def check_followed(model: PretrainModel) -> None:
    """Raise ``UserError`` if the weights move step after step, and ``after_step`` never comes.

    Where there is no teacher for it to move, what it would check is checked here. Weights that are
    loaded move them as well, but not three times in a row.
    """
    if model.is_followed or model.is_checked:
        return
    trained = [each for each in model.parameters() if each.requires_grad]
    # fused optimisers do not count versions: one tensor tells
    one = max(trained, key=torch.Tensor.numel, default=torch.zeros(()))
    seen = sum(each._version for each in trained), one.detach().sum().item()
    if seen != model.seen_weights:
        model.seen_weights = seen
        model.moves_seen += 1
    if model.moves_seen <= 3:  # the first is what was there
        return
    check_stepped(model)
    if model.teachers.momentum is not None:
        raise UserError(
            f"algorithms.{model.teachers.owner} has a teacher, which stands still: the optimiser "
            "has moved the weights three times, and model.after_step(progress) was never "
            "called. Call it after each of the optimiser's steps."
        )
    model.is_followed = True  # there is nothing to follow


def check_optimized(model: PretrainModel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if something that takes a gradient is in no optimiser's group."""
    left = _left_out(model, optimizers)
    _refuse_untrained([name for name, each in left.items() if each.requires_grad])
    _warn_of_unfrozen(model, optimizers)


def _left_out(model: PretrainModel, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the tensors by name that are in no group of these optimisers."""
    groups = _groups(optimizers)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return {name: each for name, each in model.named_parameters() if id(each) not in held}


def _groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _warn_of_unfrozen(model: PretrainModel, optimizers: Iterable[Optimizer]) -> None:
    """Warn where parts should wait for some epochs, and no group of an optimiser is ``frozen``."""
    groups = _groups(optimizers)
    for name in model.objectives:
        waiting = [part for part, epochs in model.objectives[name].frozen_epochs.items() if epochs]
        if waiting and not any(group.get("frozen") for group in groups):
            warnings.warn(
                f"algorithms.{name} lets {', '.join(waiting)} wait for some epochs, which "
                "the optimiser of pospre.train sees to; this one trains them at once. Take their "
                "gradients away in these epochs, or let nothing wait (dinov2: freeze_epochs=0).",
                stacklevel=2,
            )


def _refuse_untrained(left: list[str]) -> None:
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{len(left)} tensors take a gradient, but no optimiser trains them: "
            f"{', '.join(left[:3])}{more}. Give the model its algorithms before you make the "
            "optimiser, model = pospre.PretrainModel(encoder, [pospre.MAE()], seed=0), and the "
            "Trainer algorithms=model.algorithms; what shall not learn needs requires_grad_(False)."
        )
