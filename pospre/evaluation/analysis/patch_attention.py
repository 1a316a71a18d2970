"""Attention among the patches of whole images."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pospre.evaluation.layers import attention_maps
from pospre.model.model import PretrainModel

BYTES_AT_ONCE = 2**28  # of attention maps


def patch_attention(
    model: PretrainModel, images_BCHW: Tensor, layers: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, attention among patches (b, heads, N, N)) for parts of a batch, in its order.

    Prefix tokens (class token, registers) are left out as queries and as keys, and what is left of
    each row is divided by its sum. However large the batch, about a quarter of a GB of maps exists
    at a time.

    Args:
        model: of a ViT, in eval mode.
        images_BCHW: normalised images.
        layers: blocks, the first is 1.
    """
    rows, columns = model.encoder.grid_of(*images_BCHW.shape[-2:])
    prefix = model.encoder.num_prefix_tokens
    block: Any = model.encoder.blocks[0]
    one = 4 * block.attn.num_heads * (prefix + rows * columns) ** 2
    images = max(1, BYTES_AT_ONCE // (one * len(layers)))
    together = max(1, BYTES_AT_ONCE // (one * images))
    for part in images_BCHW.split(images):
        for start in range(0, len(layers), together):
            some = layers[start : start + together]
            for layer, maps_BHTT in zip(some, attention_maps(model, part, some), strict=True):
                among = maps_BHTT[..., prefix:, prefix:].float()
                yield layer, among / among.sum(-1, keepdim=True).clamp_min(1e-32)


def attention_entropy(maps_BHNN: Tensor) -> Tensor:
    """Return the entropy in nats of each query's attention, averaged over queries: (B, heads)."""
    return torch.special.entr(maps_BHNN).sum(-1).mean(-1)
