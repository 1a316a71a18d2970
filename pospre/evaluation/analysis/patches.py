"""Common code of analyses: attention among patches, and the choice of layers and patches."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.layers import attention_maps, check_grid, planned_encoder
from pospre.evaluation.registry import Plan
from pospre.model.model import PretrainModel
from pospre.nn.build import check_divides

BYTES_AT_ONCE = 2**28  # of attention maps


def patch_attention(
    model: PretrainModel, images_BCHW: Tensor, layers: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, attention among patches (b, heads, N, N)) for parts of a batch, in its order.

    Prefix tokens (class token, registers) are removed as queries and as keys, and rows are
    renormalised. Maps take about 0.25 GB at a time for any batch size.

    Args:
        model: with a ViT, in eval mode.
        images_BCHW: normalised images.
        layers: blocks, counted from 1.
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


def check_attention(plan: Plan[Any]) -> tuple[int, int]:
    """Return the grid of the views of an evaluation with settings ``layers`` and ``image_size``.

    Raises:
        UserError: a layer that has no attention, or a view size that the encoder does not take.
    """
    layers, side = plan.settings.layers or (), plan.settings.image_size
    encoder = planned_encoder(plan.recipe, layers)
    if 0 in layers:
        raise UserError("layer 0 is the embedding; the first attention is layer 1.")
    if side is None:
        return encoder.grid
    for patch in encoder.patch_size:
        check_divides(side, patch, key="image_size")
    grid = encoder.grid_of(side, side)
    check_grid(encoder, grid, f"image_size={side}")
    return grid


def check_queries(queries: Sequence[int], grid: tuple[int, int]) -> None:
    """Raise a ``UserError`` for patches outside the grid."""
    patches = grid[0] * grid[1]
    wrong = [query for query in queries if query >= patches]
    if wrong:
        raise UserError(
            f"queries has patch {wrong[0]}, but there are {grid[0]} × {grid[1]} patches, "
            f"numbered row by row from 0 to {patches - 1}."
        )


def three_patches(grid: tuple[int, int]) -> list[int]:
    """Return patches in the middle, the upper left and the lower right quarter."""
    rows, columns = grid
    shares = [(1, 2), (1, 4), (3, 4)]
    return [rows * part // whole * columns + columns * part // whole for part, whole in shares]


def chosen_layers(model: PretrainModel, layers: Sequence[int] | None) -> list[int]:
    """Return the chosen blocks in order, counted from 1; all if ``layers`` is None."""
    return sorted(set(layers or range(1, model.encoder.depth + 1)))


def require_two_images(plan: Plan[Any]) -> None:
    """Raise a ``UserError`` if only one image would be measured."""
    found = min(len(open_reader(plan.data)), plan.settings.num_samples or 2)
    if found < 2:
        raise UserError(
            f"it compares images with one another, but only one of {plan.data} is measured; give "
            "two or more."
        )
