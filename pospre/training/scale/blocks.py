"""The transformer blocks of a model: recomputed in the backward pass, or multiplying in 8 bits.

Each block's ``forward`` is replaced rather than the block: parameters keep their names, and the
hooks of DDP and FSDP2 stay outside of the recomputation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from composer.devices import Device
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pospre.collectives import print_once
from pospre.errors import needing
from pospre.model.model import PretrainModel
from pospre.model.teacher import Frozen
from pospre.nn.projections import is_plain

_MULTIPLE = 16
"""Widths that a GPU multiplies in 8 bits."""


def blocks_of(model: PretrainModel) -> list[nn.Module]:
    """Return the transformer blocks by which FSDP2 shards the model, including teachers'."""
    blocks: list[nn.Module] = []
    for child in model.children():
        is_block = getattr(child, "fsdp_wrap_fn", None)
        if is_block is not None:
            blocks += filter(is_block, child.modules())
    return blocks


def recompute_blocks(model: PretrainModel, *, offload: bool) -> None:
    """Make each trained block keep only its inputs, and recompute everything else when needed.

    Draws within a block come from keys, so the recomputation drops the same. ``offload`` also moves
    the inputs off the device between the two passes. The model is not yet wrapped by DDP or FSDP2.
    Frozen blocks are recomputed too: a gradient may pass through them. Those of teachers are not.
    """
    teachers = [part for part in model.modules() if isinstance(part, Frozen)]
    taught = {id(part) for teacher in teachers for part in teacher.modules()}
    for block in blocks_of(model):
        if id(block) not in taught:
            forward = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = partial(_offloaded, forward) if offload else forward


def _offloaded(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return forward(*arguments, **options)


def lacking_float8(device: Device) -> str | None:
    """Return why a device cannot multiply in 8 bits; None: it can."""
    if device.name == "cpu":
        return "CPUs cannot multiply in float8"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} has less than compute capability 8.9"
    return None


def use_float8(model: PretrainModel, device: Device) -> None:
    """Use float8 products in the blocks of a model in training, if the device supports it."""
    lacking = lacking_float8(device)
    if lacking is not None:
        print_once(f"trainer.float8 = true has no effect: {lacking}")
        return
    convert_blocks(model)


def convert_blocks(model: PretrainModel, **options: Any) -> None:
    """Make the linear layers of all blocks multiply in float8 in training, with torchao's options.

    Parameters, their names and checkpoints stay the same. Evaluations use the original layers. The
    model is not yet compiled, nor wrapped by DDP or FSDP2.
    """
    with needing("float8", "trainer.float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    config = Float8LinearConfig(pad_inner_dim=True, **options)
    for block in blocks_of(model):
        convert_to_float8_training(block, module_filter_fn=_is_wide, config=config)
        for layer in block.modules():
            if isinstance(layer, Float8Linear):
                layer.forward = partial(_forward, layer)


def _is_wide(module: nn.Module, name: str) -> bool:
    # torchao would forget what a subclass computes, or a hook, such as LoRA's
    return (
        type(module) is nn.Linear
        and is_plain(module)
        and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)
    )


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return (
        type(layer).forward(layer, x) if layer.training else F.linear(x, layer.weight, layer.bias)
    )
