"""Ends a run with a loss or weights that are not finite, before they reach a checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pospre.errors import UserError
from pospre.recipe.recipe import Recipe
from pospre.training.callbacks.each_step import (
    DoneStep,
    EachStep,
    done_step,
    kept_checkpoints,
    note_step,
)
from pospre.training.callbacks.metrics import plain_losses


class Divergence(EachStep):
    """Raises a ``UserError`` after the first step with a loss that is not finite.

    The losses are averaged over the ranks, so all ranks see the same ones. Gradients that are not
    finite are ignored: with loss scaling such steps are skipped. It must come before the saver.

    Args:
        recipe: of the run, for advice; None under your own Trainer.
        folder: for the step's samples; None: ``bad_steps`` in the run's folder.

    Attributes:
        before_stop: called on every rank before the last good checkpoint is determined.
    """

    def __init__(self, recipe: Recipe | None = None, folder: Path | None = None) -> None:
        self.recipe = recipe
        self.folder = folder
        self.before_stop: list[Callable[[], None]] = []

    def judge_step(self, state: State, step: DoneStep) -> None:
        """Check the losses of a step; its line is already written."""
        losses = plain_losses(step.losses)
        bad = [
            f"{name} = {value}"
            for name, value in losses.items()
            if name.startswith("loss/") and not math.isfinite(value)
        ]
        if not math.isfinite(losses.get("loss/total", 0.0)):
            self._stop(state, step, ", ".join(bad))

    def before_save(self, state: State) -> None:
        """Raise on every rank if a loss or a weight is not finite.

        The weights are checked through a single number for the whole model.
        """
        super().before_save(state)
        tensors = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in state.model.state_dict().items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        finite = torch.stack([value.isfinite().all() for value in tensors.values()])
        everywhere = finite.to(torch.uint8)
        dist.all_reduce(everywhere, reduce_operation="MIN")
        good = everywhere.tolist()
        if not all(good):
            self._stop(state, done_step(state), f"tensor '{list(tensors)[good.index(0)]}'")

    def _stop(self, state: State, step: DoneStep, what: str) -> None:
        for hook in self.before_stop:
            hook()
        noted = note_step(state, step, self.folder, self.recipe)
        start = f"training diverged: after step {step.number} not finite: {what}."
        if self.recipe is None:
            raise UserError(f"{start} {noted} Lower the learning rate, or lengthen its warm-up.")
        options = self.recipe.trainer
        bf16 = ", trainer.precision=amp_bf16" if options.precision == "amp_fp16" else ""
        clip = ", set trainer.clip_grad" if options.clip_grad is None else ""
        raise UserError(
            f"{start} {kept_checkpoints(self.recipe, step.number)} {noted} Lower "
            f"optimizer.base_lr (now {self.recipe.optimizer.base_lr:g}), lengthen "
            f"schedule.warmup{clip}{bf16}, and start it under another run_name; or give the same "
            "command again if the cause is gone (damaged data, a faulty GPU)."
        )
