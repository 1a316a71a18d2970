"""Tokens after each block of an encoder, attention maps, and the choice of layers and patches."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.registry import Plan
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder, check_divides
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.places import Places
from pospre.nn.vit import Encoder, as_vit
from pospre.recipe.recipe import Recipe

BYTES_AT_ONCE = 2**28  # of attention maps


def blank_encoder(recipe: Recipe) -> PatchEncoder:
    """Return a recipe's encoder without memory, for its shapes."""
    with torch.device("meta"):
        return build_encoder(**recipe.encoder.arguments())


def planned_encoder(
    recipe: Recipe, layers: Sequence[int] | Literal["all"] | None = None
) -> Encoder:
    """Return a recipe's ViT without memory; raise a ``UserError`` if it lacks one of ``layers``."""
    encoder = as_vit(blank_encoder(recipe))
    depth = encoder.depth
    asked = () if layers is None or layers == "all" else layers
    wrong = [layer for layer in asked if not 0 <= layer <= depth]
    if wrong:
        raise UserError(
            f"layer {wrong[0]}, but the encoder has {depth} blocks; 0 is the embedding, "
            f"{depth} the last block"
        )
    return encoder


def check_grid(encoder: PatchEncoder, grid: tuple[int, int], setting: str) -> None:
    """Raise a ``UserError`` that names ``setting`` if the positions do not support this grid."""
    positions = encoder.positions
    if not positions.takes_any_grid and grid != encoder.grid:
        height, width = encoder.image_size
        raise UserError(
            f"{setting}, but encoder.positions = {positions.name} supports only images of "
            f"{height} × {width} pixels ({encoder.grid[0]} × {encoder.grid[1]} patches)."
        )


def layer_tokens(
    model: PretrainModel,
    images_BCHW: Tensor,
    layers: Sequence[int],
    *,
    norm: bool = True,
    places: Places | None = None,
    keys_B: Tensor | None = None,
    grad: bool = False,
) -> list[Tensor]:
    """Return the tokens (B, P+N, D) after each of ``layers``, the P prefix tokens first.

    Layer 0 is the input of the first block (patches and positions), 1 its output, and so on.
    ``norm`` applies the encoder's final norm to each of them, as DINO and DINOv2 do. For ``places``
    and ``keys_B`` see ``Encoder.forward``.
    """
    encoder = model.vit
    with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        hidden = encoder(images_BCHW, places=places, keys_B=keys_B, layers=layers)
        return [encoder.norm(tokens) for tokens in hidden] if norm else hidden


@torch.no_grad()
def attention_maps(
    model: PretrainModel, images_BCHW: Tensor, layers: Sequence[int]
) -> list[Tensor]:
    """Return the attention (B, heads, T, T) of each of ``layers``, blocks counted from 1.

    Rows are queries and sum to 1.
    """
    maps: dict[int, Tensor] = {}

    def keep_of(layer: int) -> Any:
        def keep(attention: Any, arguments: tuple[Any, ...]) -> None:
            maps[layer] = attention.weights(*arguments[:2])

        return keep

    attentions: list[Any] = [block.attn for block in model.vit.blocks]
    with ExitStack() as hooks:
        for layer in layers:
            hook = attentions[layer - 1].register_forward_pre_hook(keep_of(layer))
            hooks.enter_context(hook)
        model.encoder(images_BCHW)
    return [maps[layer] for layer in layers]


def patch_attention(
    model: PretrainModel, images_BCHW: Tensor, layers: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, attention among patches (b, heads, N, N)) for parts of a batch, in its order.

    Layers are blocks, counted from 1. Prefix tokens (class token, registers) are removed as queries
    and as keys, and rows are renormalised. Maps take about 0.25 GB at a time for any batch size.
    """
    rows, columns = model.encoder.grid_of(*images_BCHW.shape[-2:])
    prefix = model.encoder.num_prefix_tokens
    block: Any = model.vit.blocks[0]
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
    """Return the grid of the views of an evaluation with settings ``layers`` and ``image_size``."""
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


def chosen_layers(
    layers: tuple[int, ...] | Literal["all"] | None, depth: int, *, first: int = 0
) -> list[int]:
    """Return the chosen layers in order; without a choice, all from ``first``."""
    if layers is None or layers == "all":
        return list(range(first, depth + 1))
    return sorted(set(layers))
