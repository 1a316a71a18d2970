"""The optimiser and its parameter groups: weight decay, learning rates, and initial freezes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pospre.arguments import typed
from pospre.model.algorithm import unwrapped
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.lora import PAIRS
from pospre.nn.positions.scheme import Scheme
from pospre.recipe.sections import Optimizer

# modules that edit tokens before the first block learn like the patch embedding
_EDITORS = ("contents.", "places.")
_TOKENS = ("cls_token", "reg_token", "patch_embed")


def build_optimizer(
    model: nn.Module, options: Optimizer, *, batch_size: int, stages: Stages | None = None
) -> torch.optim.Optimizer:
    """Return the fused optimiser, every group at its peak rate for this global batch."""
    peak = batch_peak(options, batch_size)
    groups = recipe_groups(model, options, peak, stages)
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=peak, momentum=options.momentum, fused=True)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=peak, betas=options.betas, eps=options.eps, fused=True)


def batch_peak(options: Optimizer, batch_size: int) -> float:
    """Return the peak rate of parameters with the full rate, for this global batch."""
    ratio = batch_size / options.lr_batch
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    return options.base_lr * factors[options.lr_rule]


@typed
def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.05,
    layer_decay: float | None = None,
    patch_embed_lr: float = 1.0,
    lora_lr: float = 1.0,
    no_decay: Sequence[str] = (),
    stages: Stages | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for torch's optimisers, by learning rate and weight decay.

    Vectors (biases, norms, layer scale), a scheme's frequencies and slopes, and the pairs of LoRA
    are never decayed.
    The class and mask tokens have three dimensions and are decayed, as in MAE's code. Besides
    torch's own keys, a group has the keys ``decayed`` and ``life``.

    Args:
        model: the model to train; parameters without gradient are left out.
        lr: the full learning rate.
        weight_decay: weight decay of decayed parameters.
        layer_decay: rate factor from each block of the encoder to the one below,
            ``layer_decay ** (depth + 1 − id)`` (BEiT, MAE). id is 0 for the patch embedding, tokens
            and positions added to them; b + 1 for block b and its own relative positions; and
            depth + 1, the full rate, for all others, including those shared by blocks. Swin's
            blocks are counted over its stages (UM-MAE). None: one rate for all. Only for a
            ``PretrainModel``, or one wrapped by DDP or ``torch.compile``.
        patch_embed_lr: rate factor of the patch embedding.
        lora_lr: rate factor of LoRA's pairs.
        no_decay: parts of names of further parameters without decay.
        stages: of the training; tensors that train in other stages are in other groups, and
            ``stages.factor(group["life"], step)`` is the factor of a group's rate.

    Raises:
        UserError: an argument is unknown, of a wrong type or out of range, or there are no blocks
            to count.
    """
    options = Optimizer(
        weight_decay=weight_decay,
        layer_decay=layer_decay,
        patch_embed_lr=patch_embed_lr,
        lora_lr=lora_lr,
        no_decay=tuple(no_decay),
    )
    if layer_decay is not None:
        model = unwrapped(model)
    return _groups(model, options, lr, {}, stages)


def recipe_groups(
    model: nn.Module, options: Optimizer, peak: float, stages: Stages | None = None
) -> list[dict[str, Any]]:
    """Return the groups of a recipe's optimiser, for use with our schedule.

    They also have the number of epochs for which they are ``frozen`` (``Uses.frozen``), and their
    ``life``, see ``Stages``.
    """
    return _groups(model, options, peak, dict(_frozen_epochs(model)), stages)


def _groups(
    model: nn.Module,
    options: Optimizer,
    lr: float,
    waiting: Mapping[str, int],
    stages: Stages | None,
) -> list[dict[str, Any]]:
    schemes = [module for module in model.modules() if isinstance(module, Scheme)]
    undecayed = {id(getattr(scheme, name)) for scheme in schemes for name in scheme.undecayed}
    groups: dict[tuple[bool, float, int, tuple[bool, ...]], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed = parameter.ndim > 1 and id(parameter) not in undecayed and PAIRS not in name
        decayed = decayed and not any(part in name for part in options.no_decay)
        scale = rate_scale(model, name, options)
        frozen = max((e for start, e in waiting.items() if name.startswith(start)), default=0)
        life = (True,) if stages is None else stages.life(name)
        group = groups.setdefault(
            (decayed, scale, frozen, life),
            {
                "params": [],
                "lr": lr * scale,
                "weight_decay": options.weight_decay if decayed else 0.0,
                "decayed": decayed,
                "frozen": frozen,
                "life": life,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def rate_scale(model: nn.Module, name: str, options: Optimizer) -> float:
    """Return the factor of a parameter's learning rate: its part's own, and layer decay."""
    scale = options.patch_embed_lr if "patch_embed" in name else 1.0
    scale *= options.lora_lr if PAIRS in name else 1.0
    if options.layer_decay is None or not isinstance(model, PretrainModel):
        return scale
    above = model.encoder.depth + 1 - _layer_id(name, model.encoder)
    return scale * options.layer_decay**above


def _layer_id(name: str, encoder: PatchEncoder) -> int:
    own = name.removeprefix("encoder.")
    block = encoder.block_of(own)
    if block is not None:
        return block + 1
    inputs = (*_TOKENS, *(f"positions.{each}" for each in encoder.positions.inputs))
    is_input = name.startswith(_EDITORS) or (own != name and own.startswith(inputs))
    return 0 if is_input else encoder.depth + 1


def _frozen_epochs(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield (start of a full parameter name, number of frozen epochs)."""
    if isinstance(model, PretrainModel):
        for name, parts in model.layout.frozen.items():
            for start, epochs in parts.items():
                yield f"objectives.named.{name}.{start}", epochs
