"""What an optimiser leaves out, or trains too early: under a Trainer, and in a plain loop."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pospre.errors import UserError
from pospre.model.model import PretrainModel


def fingerprints(model: PretrainModel) -> dict[str, tuple[int, float]]:
    """Return what changes when an optimiser moves a tensor: its version, or the sum of it."""
    return {
        name: (parameter._version, parameter.detach().double().sum().item())
        for name, parameter in model.named_parameters()
    }


def check_moved(model: PretrainModel) -> None:
    """Raise ``UserError`` if the optimiser's first step has moved some tensors, but not all.

    Only tensors that hold a gradient are checked. A step that moved none (skipped by a gradient
    scaler, or with a learning rate of 0) proves nothing.
    """
    if not model.before_first_step:
        return
    now, before = fingerprints(model), model.before_first_step
    still = [name for name in before if now.get(name) == before[name]]
    if len(still) < len(before):
        model.before_first_step = {}  # asked once
        held = dict(model.named_parameters())
        _refuse_untrained([name for name in still if held[name].grad is not None])


def check_followed(model: PretrainModel) -> None:
    """Raise ``UserError`` if the weights move step after step, and ``after_step`` never comes.

    Where there is no teacher for it to move, what it would check is checked here. Weights that are
    loaded move them as well, but not three times in a row.
    """
    if not model.before_first_step:
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
    check_moved(model)
    if model.teachers.momentum is not None:
        raise UserError(
            f"algorithms.{model.teachers.owner} has a teacher, which stands still: the optimiser "
            "has moved the weights three times, and pospre.after_step(model, algorithms, progress) "
            "was never called. Call it after each of the optimiser's steps."
        )


def check_optimized(model: PretrainModel, optimizers: Sequence[Optimizer]) -> None:
    """Raise ``UserError`` if something that takes a gradient is in no optimiser's group."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    left = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in held
    ]
    _refuse_untrained(left)
    _warn_of_unfrozen(model, groups)


def _warn_of_unfrozen(model: PretrainModel, groups: list[dict[str, Any]]) -> None:
    """Warn where parts should wait for some epochs, and no group of an optimiser is ``frozen``."""
    for name in model.objectives:
        waiting = [part for part, epochs in model.objectives[name].frozen_epochs.items() if epochs]
        if waiting and not any(group.get("frozen") for group in groups):
            warnings.warn(
                f"algorithms.{name} lets {', '.join(waiting)} wait at the beginning, as "
                "dinov2.freeze_epochs says, which the optimiser of pospre.train sees to; this one "
                "trains them at once. Set it to 0, or take their gradients away in these epochs.",
                stacklevel=2,
            )


def _refuse_untrained(left: list[str]) -> None:
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{len(left)} tensors take a gradient, but no optimiser trains them: "
            f"{', '.join(left[:3])}{more}. Attach the algorithms before you make the optimiser, "
            'algorithm = pospre.attach(model, "mae"), and give the Trainer that one; what shall '
            "not learn needs requires_grad_(False)."
        )
