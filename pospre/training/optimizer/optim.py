"""The optimiser with its parameter groups."""

import math

import torch
from torch import nn

from pospre.recipe.sections import Optimizer
from pospre.training.optimizer.groups import recipe_groups


def build_optimizer(
    model: nn.Module, options: Optimizer, *, batch_size: int
) -> torch.optim.Optimizer:
    """Return the fused optimiser, every group at its peak rate for this global batch."""
    peak = batch_peak(options, batch_size)
    groups = recipe_groups(model, options, peak)
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=peak, momentum=options.momentum, fused=True)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=peak, betas=options.betas, eps=options.eps, fused=True)


def batch_peak(options: Optimizer, batch_size: int) -> float:
    """Return the peak rate of parameters that learn at the full rate, for this global batch."""
    ratio = batch_size / options.lr_batch
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return options.base_lr * factors[options.lr_rule]
