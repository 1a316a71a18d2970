"""Intermediate results of an encoder: tokens after each block, and attention maps."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.patch_encoder import PatchEncoder
from pospre.nn.places import Places
from pospre.nn.swin.encoder import SWIN
from pospre.nn.vit import Encoder
from pospre.recipe.recipe import Recipe


def blank_encoder(recipe: Recipe) -> Encoder:
    """Return a recipe's encoder without memory, for its shapes."""
    with torch.device("meta"):
        return build_encoder(**recipe.encoder.arguments())


def planned_encoder(
    recipe: Recipe, layers: Sequence[int] | Literal["all"] | None = None
) -> Encoder:
    """Return a recipe's ViT without memory.

    Raises:
        UserError: the encoder is not a ViT, or it lacks one of ``layers``.
    """
    if recipe.encoder.name == SWIN:
        raise UserError(f"it reads the blocks of a ViT, but the encoder is {SWIN}")
    encoder = blank_encoder(recipe)
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

    Args:
        model: with a ViT, in eval mode.
        images_BCHW: normalised images.
        layers: 0 is the input of the first block (patches and positions), 1 its output, and so on.
        norm: apply the encoder's final norm to each of them, as DINO and DINOv2 do.
        places: see ``PretrainModel.tokens``.
        keys_B: see ``PretrainModel.tokens``.
        grad: whether to keep gradients.
    """
    encoder = model.encoder
    with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        found = encoder(images_BCHW, places=places, keys_B=keys_B, layers=layers)
        return [encoder.norm(tokens) for tokens in found] if norm else found


@torch.no_grad()
def attention_maps(
    model: PretrainModel, images_BCHW: Tensor, layers: Sequence[int]
) -> list[Tensor]:
    """Return the attention (B, heads, T, T) of each of ``layers``: rows are queries and sum to 1.

    Args:
        model: with a ViT, in eval mode.
        images_BCHW: normalised images.
        layers: blocks, counted from 1.
    """
    found: dict[int, Tensor] = {}

    def keep_of(layer: int) -> Any:
        def keep(attention: Any, arguments: tuple[Any, ...]) -> None:
            found[layer] = attention.weights(*arguments[:2])

        return keep

    attentions = [block.attn for block in model.encoder.blocks]
    with ExitStack() as hooks:
        for layer in layers:
            hook = attentions[layer - 1].register_forward_pre_hook(keep_of(layer))
            hooks.enter_context(hook)
        model.tokens(images_BCHW)
    return [found[layer] for layer in layers]
