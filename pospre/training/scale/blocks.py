"""The transformer blocks of a model, and recomputing their activations in the backward pass.

Each block's ``forward`` is replaced rather than the block: parameters keep their names, and the
hooks of DDP and FSDP2 stay outside of the recomputation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pospre.model.model import PretrainModel


def blocks_of(model: PretrainModel) -> list[nn.Module]:
    """Return the transformer blocks by which FSDP2 shards the model, including teachers'."""
    found: list[nn.Module] = []
    for child in model.children():
        is_block = getattr(child, "fsdp_wrap_fn", None)
        if is_block is not None:
            found += filter(is_block, child.modules())
    return found


def recompute_blocks(model: PretrainModel, *, offload: bool) -> None:
    """Make each trained block keep only its inputs, and recompute everything else when needed.

    Draws within a block come from keys, so the recomputation drops the same.

    Args:
        model: not yet wrapped by DDP or FSDP2.
        offload: also move the inputs off the device between the two passes.
    """
    for block in blocks_of(model):
        if any(parameter.requires_grad for parameter in block.parameters()):
            forward = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = partial(_offloaded, forward) if offload else forward


def _offloaded(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return forward(*arguments, **options)
