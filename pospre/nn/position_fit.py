"""Biases of attention that replace other positions of trained weights, in closed form.

What positions do to attention is the difference of two logits: those of the encoder, and those of
the same weights without positions, averaged over images. A scheme's biases are fitted to it, block
by block. The encoder's logits alone would not do: neighbours look alike, so content would count
twice.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pospre.nn.places import Places
from pospre.nn.positions.scheme import centred
from pospre.nn.vit import Encoder

_AT_ONCE = 4  # images: logits of ViT-L/14 at 224 pixels take 17 MB each


@torch.no_grad()
def patch_logits(encoder: Encoder, images_BCHW: Tensor) -> list[Tensor]:
    """Return each block's attention logits between patches: float32 (heads, N, N), image means."""
    prefix = encoder.num_prefix_tokens
    sums: dict[int, Tensor] = {}

    def adding(layer: int) -> Callable[..., None]:
        def add(attention: Any, arguments: tuple[Any, ...]) -> None:
            logits = attention.logits(*arguments[:2])[:, :, prefix:, prefix:].float().sum(0)
            sums[layer] = sums[layer] + logits if layer in sums else logits

        return add

    with ExitStack() as hooks:
        for layer, block in enumerate(encoder.blocks):
            attention: Any = block.attn
            hooks.enter_context(attention.register_forward_pre_hook(adding(layer)))
        for part in images_BCHW.split(_AT_ONCE):
            encoder(part)
    return [sums[layer] / len(images_BCHW) for layer in range(encoder.depth)]


@torch.no_grad()
def fit_biases(encoder: Encoder, original: Encoder, images_BCHW: Tensor) -> float:
    """Fit the biases of ``encoder`` to the positions of ``original``, which has its other weights.

    Return the share of what positions do to the logits (their variance) that the biases do too.
    """
    scheme, grid = encoder.positions, encoder.grid_of(*images_BCHW.shape[-2:])
    for parameter in scheme.parameters():
        parameter.zero_()
    logits = (patch_logits(each, images_BCHW) for each in (original, encoder))
    wanted = [centred(own - bare) for own, bare in zip(*logits, strict=True)]
    for layer, logits_HNN in enumerate(wanted):
        scheme.fit(logits_HNN, layer, grid)
    prefix, left = encoder.num_prefix_tokens, 0.0
    for logits_HNN, terms in zip(wanted, scheme.layer_terms(Places(grid)), strict=True):
        assert terms.bias is not None
        left += float((logits_HNN - centred(terms.bias[0, :, prefix:, prefix:])).square().sum())
    return 1 - left / max(sum(float(each.square().sum()) for each in wanted), 1e-30)
