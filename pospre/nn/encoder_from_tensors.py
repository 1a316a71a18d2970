"""Infer an encoder's options from a state dict with timm's names."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pospre.errors import UserError
from pospre.nn.encoder_options import Positions
from pospre.nn.positions.foreign import has_table, is_interleaved, turns, with_prefix_rows
from pospre.nn.positions.sincos import is_sincos
from pospre.nn.sizes import SIZES
from pospre.nn.timm_models import PREFIX
from pospre.nn.weight_layouts import is_gated

# published encoders of other sizes, by width, or by width, MLP width and SwiGLU
_OTHERS = {1408: "vit_giant_patch14_224"}
_DINOV3 = {
    (384, 1536, False): "vit_small_patch16_dinov3",
    (384, 3072, True): "vit_small_plus_patch16_dinov3",
    (768, 3072, False): "vit_base_patch16_dinov3",
    (1024, 4096, False): "vit_large_patch16_dinov3",
    (1280, 10240, True): "vit_huge_plus_patch16_dinov3",
    (4096, 16384, True): "vit_7b_patch16_dinov3",
}
_ROPE_VIT = {
    (384, 1536, False): "vit_small_patch16_rope_224",
    (768, 3072, False): "vit_base_patch16_rope_224",
    (1024, 4096, False): "vit_large_patch16_rope_224",
}
_EVA_02 = {
    (192, 1024, True): "eva02_tiny_patch14_224",
    (384, 2048, True): "eva02_small_patch14_224",
    (768, 4096, True): "eva02_base_patch14_224",
    (1024, 5460, True): "eva02_large_patch14_224",
}
_TABLE = "relative_position_bias_table"
_USUAL_SIDE = 224


def encoder_options(
    tensors: Mapping[str, Tensor], name: str, given: Positions | None = None
) -> dict[str, Any]:
    """Infer the arguments of ``build_encoder`` from an encoder's tensors in the file ``name``.

    Published values fill in what tensors cannot show: the number of heads follows from the width,
    and without positions the image size is 224 pixels. Layer scale's factors are loaded, so their
    initial value is 1. ``given`` are the positions, if no tensor shows them.

    Raises:
        UserError: no known encoder has this width, or the positions are not a square grid.
    """
    kernel = tensors["patch_embed.proj.weight"]
    patch, width = (int(kernel.shape[2]), int(kernel.shape[3])), len(kernel)
    class_token = "cls_token" in tensors
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    bare = registers > 0 or not class_token or (given is not None and has_table(given))
    positions, grid = _positions(tensors, name, class_token, registers, bare=bare)
    image_size = (_USUAL_SIDE, _USUAL_SIDE) if grid is None else (grid * patch[0], grid * patch[1])
    positions = positions if given is None else given
    numbers = [int(key.split(".")[1]) for key in tensors if key.startswith("blocks.")]
    return {
        "name": _size_name(width, tensors, name, given),
        "image_size": image_size,
        "patch_size": patch,
        "depth": 1 + max(numbers, default=-1),
        "channels": int(kernel.shape[1]),
        "positions": positions,
        "class_token": class_token,
        "num_registers": registers,
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "final_norm": "norm.weight" in tensors,
    }


def _size_name(
    width: int, tensors: Mapping[str, Tensor], name: str, given: Positions | None
) -> str:
    hidden = len(tensors.get("blocks.0.mlp.fc1.weight", ()))
    shape = (width, hidden, is_gated(tensors))
    fitting = _rotary_sizes(shape, tensors, given)
    fitting += [
        key
        for key, size in SIZES.items()
        if (size.embed_dim, size.hidden_dim, size.swiglu) == shape
    ]
    if width in _OTHERS:
        fitting.append(f"{PREFIX}{_OTHERS[width]}")
    if not fitting:
        raise UserError(
            f"{name}: cannot infer the number of heads of an encoder of width {width} with an MLP "
            f"of {hidden}. Give its timm model: timm:NAME,FILE"
        )
    return fitting[0]


def _rotary_sizes(
    shape: tuple[int, int, bool], tensors: Mapping[str, Tensor], given: Positions | None
) -> list[str]:
    """Return the published rotary encoders of this shape; they differ in ε and biases."""
    if given is None or not turns(given):
        return []
    if is_interleaved(given):
        return [f"{PREFIX}{each[shape]}" for each in (_ROPE_VIT, _EVA_02) if shape in each]
    bias = tensors.get("blocks.0.attn.qkv.bias")
    if shape not in _DINOV3 or (bias is not None and bool(bias.chunk(3)[1].any())):
        return []  # DINOv3's keys have no bias
    return [f"{PREFIX}{_DINOV3[shape]}{'' if bias is None else '_qkvb'}"]


def _positions(
    tensors: Mapping[str, Tensor], name: str, class_token: bool, registers: int, *, bare: bool
) -> tuple[Positions, int | None]:
    """Return the kind of positions and the side of their grid."""
    if "pos_embed" in tensors:
        table = with_prefix_rows(tensors["pos_embed"], class_token, registers, bare=bare)
        patches = table[0, class_token + registers :]
        side = _side(len(patches), name, "pos_embed")
        return "sincos" if is_sincos(patches, side, side) else "learned", side
    shared = f"shared_rel_pos.{_TABLE}"
    own = f"blocks.0.attn.rel_pos.{_TABLE}"
    for kind, key in (("relative", own), ("shared_relative", shared)):
        if key in tensors:
            distances = _side(len(tensors[key]) - 3 * class_token, name, key)
            return kind, (distances + 1) // 2
    return "none", None


def _side(count: int, name: str, key: str) -> int:
    side = math.isqrt(max(count, 0))
    if side < 1 or side * side != count:
        raise UserError(
            f"{name}: the {count} positions of its tensor '{key}' are not a square grid. Give its "
            "timm model: timm:NAME,FILE"
        )
    return side
