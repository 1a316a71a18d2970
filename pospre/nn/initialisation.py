"""Published weight initialisations; ``build_encoder`` lists the methods that use them."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def init_weights(module: nn.Module) -> None:
    """Initialise Linear (Xavier-uniform, zero bias) and LayerNorm (ones, zeros) below ``module``.

    A convolution's bias keeps PyTorch's default, as in the published code.
    """
    _init_layers(module, nn.Linear, nn.init.xavier_uniform_)


def init_patch_embed(projection: nn.Conv2d) -> None:
    """Initialise a patch embedding's weight like a Linear layer's (Xavier-uniform)."""
    nn.init.xavier_uniform_(projection.weight.view(len(projection.weight), -1))


def token_parameter(dim: int, *, cut: bool = False) -> nn.Parameter:
    """Return a learned (1, 1, dim) token, drawn by ``init_token``."""
    token = nn.Parameter(torch.empty(1, 1, dim))
    init_token(token, cut=cut)
    return token


def init_token(token: nn.Parameter, *, std: float = 0.02, cut: bool = False) -> None:
    """Draw a token from N(0, std²); ``cut`` truncates at one std, as BEiT and SimMIM do."""
    if cut:
        nn.init.trunc_normal_(token, std=std, a=-std, b=std)
    else:
        nn.init.normal_(token, std=std)


def init_trunc_normal(module: nn.Module, *, convolutions: bool = True) -> None:
    """Initialise Linear and Conv2d below ``module`` from N(0, 0.02²) truncated at ±2; zero biases.

    ``convolutions=False`` keeps PyTorch's initialisation of convolutions (DeiT, DINOv2).
    """
    drawn = (nn.Linear, nn.Conv2d) if convolutions else nn.Linear
    _init_layers(module, drawn, partial(nn.init.trunc_normal_, std=0.02))


def _init_layers(module: nn.Module, drawn: Any, draw: Callable[[Tensor], Any]) -> None:
    for part in module.modules():
        if _is_empty(part):
            continue
        if isinstance(part, drawn):
            draw(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()


def init_beit(blocks: Iterable[Any], module: nn.Module) -> None:
    """Initialise as BEiT and SimMIM do: N(0, 0.02²) truncated at one std, then fix-init.

    The last projections of both branches of block l (counted from 1) are divided by √(2l). This
    keeps the residual stream from growing with depth. ``module`` includes the blocks.
    """
    init_trunc_normal(module)
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)) and not _is_empty(part):
            nn.init.trunc_normal_(part.weight, std=0.02, a=-0.02, b=0.02)
    for depth, block in enumerate(blocks, start=1):
        for last in (block.attn.proj, block.mlp.fc2):
            last.weight.div_(math.sqrt(2 * depth))


def _is_empty(part: nn.Module) -> bool:
    """Return whether a layer is on the meta device, where drawing takes longer than building it."""
    weight = getattr(part, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.is_meta
