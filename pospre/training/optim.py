"""AdamW with MAE's parameter groups, the learning-rate schedule per step, and gradient clipping."""

from collections.abc import Callable

import torch
from composer.algorithms import GradientClipping
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from pospre.errors import UserError
from pospre.schedules import cosine_warmup, duration_steps, peak_rate
from pospre.sections import ClipGrad, Optimizer, Schedule


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the trained parameters in two groups: with weight decay, and without.

    Only vectors (biases, norms) go without. The class and mask tokens have three dimensions and
    are decayed, as in MAE's code.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, options: Optimizer, *, batch_size: int
) -> torch.optim.Optimizer:
    """Return fused AdamW at the peak rate of ``base_lr`` for this global batch."""
    return torch.optim.AdamW(
        parameter_groups(model, options.weight_decay),
        lr=peak_rate(options.base_lr, batch_size),
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )


def build_schedule(
    optimizer: torch.optim.Optimizer,
    options: Schedule,
    *,
    total_steps: int,
    steps_per_epoch: int,
    batch_size: int,
) -> LambdaLR:
    """Return the schedule that gives step t the rate of step t.

    It counts its own steps. Composer's schedulers read the clock before it advances, so that each
    step would get its predecessor's rate.
    """
    warmup = duration_steps(options.warmup, steps_per_epoch=steps_per_epoch, batch_size=batch_size)
    if warmup >= total_steps:
        raise UserError(
            f"schedule.warmup = {options.warmup} is {warmup} steps, but the whole run "
            f"(trainer.max_duration) only {total_steps}; shorten the warm-up"
        )
    peak = optimizer.param_groups[0]["lr"]
    if options.min_lr > peak:
        raise UserError(f"schedule.min_lr = {options.min_lr} is above the peak rate {peak:g}")
    floor = options.min_lr / peak

    def share(step: int) -> float:
        return cosine_warmup(step, warmup_steps=warmup, total_steps=total_steps, floor=floor)

    return LambdaLR(optimizer, share)


class MeanOverRanks(Algorithm):
    """Divide FSDP2's gradients by the number of ranks where the backend is gloo.

    FSDP2 asks for the mean over ranks; gloo's reduce-scatter (torch 2.7) returns the sum without
    a word. AdamW hardly shows it, clipping does. NCCL averages.
    """

    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are there, before they are clipped."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Turn every sum into a mean."""
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())


class PerTensorClipping(Algorithm):
    """Clip the gradient of every parameter tensor to a norm of its own, as DINO and DropPos do."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def match(self, event: Event, state: State) -> bool:
        """Run when the gradients of all microbatches are there."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale down each gradient whose norm is above the threshold."""
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                clip_tensor(parameter.grad, self.threshold)


def clip_tensor(gradient: Tensor, threshold: float) -> None:
    """Scale ``gradient`` in place to a norm of at most ``threshold``, over all its shards."""
    norm = torch.linalg.vector_norm(gradient)
    if isinstance(gradient, DTensor):
        # The norm of a sharded tensor is a sum still to be made; scaling each shard is local.
        assert isinstance(norm, DTensor)
        gradient, norm = gradient.to_local(), norm.full_tensor()
    gradient.mul_((threshold / (norm + 1e-6)).clamp(max=1.0))


def build_clipping(options: ClipGrad | None) -> list[Algorithm]:
    """Return the algorithm that clips gradients, if the recipe asks for one."""
    if options is None:
        return []
    makers: dict[str, Callable[[float], Algorithm]] = {
        "norm": lambda threshold: GradientClipping("norm", threshold),
        "per_tensor": PerTensorClipping,
    }
    return [makers[options.mode](options.threshold)]
