"""The transformer blocks of a model, and computing their activations again in the backward pass.

Each block's ``forward`` is replaced, never the block: parameters keep their names, and the hooks of
DDP and FSDP2 stay around what is computed again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pospre.model.model import PretrainModel


def blocks_of(model: PretrainModel) -> list[nn.Module]:
    """Return the transformer blocks by which FSDP2 shards the model, those of teachers too."""
    found: list[nn.Module] = []
    for child in model.children():
        is_block = getattr(child, "fsdp_wrap_fn", None)
        if is_block is not None:
            found += filter(is_block, child.modules())
    return found


def recompute_blocks(model: PretrainModel, *, offload: bool) -> None:
    """Let each trained block keep its inputs alone, and compute all else again when it is needed.

    What is drawn within a block is drawn from keys, so that it drops the same again.

    Args:
        model: not yet wrapped by DDP or FSDP2.
        offload: the inputs, too, leave the device between the two passes.
    """
    for block in blocks_of(model):
        if any(parameter.requires_grad for parameter in block.parameters()):
            forward = partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = partial(_offloaded, forward) if offload else forward


def _offloaded(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=True):
        return forward(*arguments, **options)
