"""Conversion between our encoder and timm's ``Eva`` (EVA, EVA-02, DINOv3, RoPE-ViT)."""

import math
from typing import Any

import timm
import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
)
from timm.models.eva import Eva, EvaAttention, EvaBlock
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.encoder_options import Positions
from pospre.nn.positions.foreign import (
    DINOV3,
    cells,
    constant_frequencies,
    has_table,
    is_interleaved,
    rotation_of,
    turns,
    with_table,
)
from pospre.nn.positions.scheme import Scheme
from pospre.nn.sizes import GIANT, SIZES, EncoderSize, pair
from pospre.nn.weights.names import TIMM_EVA, apart, interleaved, theirs

_NAMES = {
    (1e-5, True): "vit_small_patch16_dinov3_qkvb",
    (1e-6, True): "vit_small_patch16_rope_224",
    (1e-6, False): "eva_giant_patch14_224",
}
"""timm models by ε of the norms and layer scale, which no argument of timm can change."""
_BASES = {"rotary": 100.0, "rotary_mixed": 10.0}


def eva_size(vit: Eva, name: str) -> EncoderSize:
    """Return the size of a timm model; raise ``UserError`` if it has parts that ours lacks."""
    block: Any = vit.blocks[0]
    if type(block) is not EvaBlock or type(block.mlp) not in (Mlp, GluMlp, SwiGLU):
        raise UserError(f"timm's {name} is post-norm; our encoder is pre-norm.")
    attention, mlp = block.attn, block.mlp
    if not isinstance(attention.norm, nn.Identity):
        raise UserError(f"timm's {name} normalises within attention, which our encoder does not.")
    gated = not isinstance(mlp, Mlp)
    inner = mlp.fc2.in_features
    return EncoderSize(
        GIANT if gated else SIZES["vitb16"].timm_name,  # with other positions it may be a plain one
        pair(vit.patch_embed.patch_size),
        vit.embed_dim,
        len(vit.blocks),
        attention.num_heads,
        mlp_ratio=inner * (1 + gated) / vit.embed_dim,
        swiglu=gated,
        mlp_norm=not isinstance(mlp.norm, nn.Identity),
        pre_norm=not isinstance(vit.norm_pre, nn.Identity),
        qkv_bias=_has_bias(attention),
        key_bias=isinstance(attention, AttentionRope),
        eps=block.norm1.eps,
    )


def eva_positions(vit: Eva, name: str) -> Positions:
    """Return the positions of a timm model; raise ``UserError`` if we have no such scheme."""
    rope: Any = vit.rope
    table = vit.pos_embed is not None
    if rope is None:
        return "learned" if table else "none"
    if isinstance(rope, RotaryEmbeddingDinoV3):
        known = rope.normalize_coords == "separate" and rope.min_period is None
        assert rope.temperature is not None  # as min_period is not
        base = float(rope.temperature)
        rotation: Positions = DINOV3 if base == 100 else {"rotary": {"base": base}}
    elif isinstance(rope, RotaryEmbeddingCat):
        known = not (rope.in_pixels or rope.linear_bands or rope.grid_offset)
        known &= rope.ref_feat_shape in (None, (16, 16))
        rotation = cells(
            rope.temperature,
            columns_first=rope.grid_indexing == "xy",
            reference=rope.ref_feat_shape is not None,
        )
    else:
        known = isinstance(rope, RotaryEmbeddingMixed) and rope.grid_indexing == "xy"
        rotation = "rotary_mixed"
    if not known:
        raise UserError(f"timm's {name} has rotary positions of a kind that our encoder lacks.")
    return with_table(table, rotation)


def _rotation(positions: Positions) -> dict[str, Any]:
    """Return timm's arguments for the rotation of queries and keys."""
    rotation = rotation_of(positions)
    if rotation is None:
        return {"use_rot_pos_emb": False}
    name, options = rotation
    said = {"use_rot_pos_emb": True, "rope_temperature": options.get("base", _BASES[name])}
    if name == "rotary_mixed" or _is_directed(options):
        return {**said, "rope_type": "mixed", "rope_grid_indexing": "xy"}
    if not is_interleaved(positions):
        return {**said, "rope_type": "dinov3", "rope_rotate_half": True}
    said |= {"rope_type": "cat"}
    said |= {"rope_grid_indexing": "xy" if options.get("columns_first") else "ij"}
    return {**said, "ref_feat_shape": 16} if options["coordinates"] == "reference" else said


def _is_directed(options: dict[str, Any]) -> bool:
    """Return whether ``rotary`` turns along other directions than the axes: mixed ones in timm."""
    return options.get("directions", 2) != 2


def turns_pairs(vit: nn.Module) -> bool:
    """Return whether it rotates channels 2i and 2i + 1 together; ours rotates i and i + D/2."""
    block: Any = vit.blocks[0] if isinstance(vit, Eva) else None
    return block is not None and vit.rope is not None and not block.attn.rotate_half


def _has_bias(attention: Any) -> bool:
    """Return whether queries and values have a bias, which timm stores in one of three ways."""
    if isinstance(attention, EvaAttention) and attention.qkv is not None:
        return attention.q_bias is not None
    return (attention.q_proj if attention.qkv is None else attention.qkv).bias is not None


def eva_model(
    size: EncoderSize, options: dict[str, Any], positions: Positions
) -> tuple[str, dict[str, Any]]:
    """Return the model name and the arguments for ``timm.create_model``; see ``timm_model``."""
    turns_alone = turns(positions) and not has_table(positions)
    inner = size.hidden_dim // 2 if size.swiglu else size.hidden_dim
    named = ("img_size", "patch_size", "depth", "in_chans", "class_token", "init_values")
    key = size.eps, options["init_values"] is not None
    return _NAMES.get(key, _NAMES[1e-6, key[1]]), {
        **{key: options[key] for key in named if options[key] is not None},
        "embed_dim": size.embed_dim,
        "num_heads": size.num_heads,
        "mlp_ratio": _ratio(inner, size.embed_dim),
        "swiglu_mlp": size.swiglu,
        "swiglu_align_to": 0 if inner % 8 else 8,  # gate and value are two layers then
        "scale_mlp": size.mlp_norm,
        "attn_type": "rope" if size.key_bias else "eva",
        "qkv_bias": size.qkv_bias,
        "num_reg_tokens": options["reg_tokens"],
        "use_pre_transformer_norm": size.pre_norm,
        "use_post_transformer_norm": options["final_norm"],
        "use_fc_norm": False,
        "global_pool": "token" if options["class_token"] else "",
        "use_abs_pos_emb": not turns_alone,  # without positions: a table of zeros
        "rope_rotate_half": False,
        "dynamic_img_size": True,
        **_rotation(positions),
    }


def _ratio(inner: int, dim: int) -> float:
    """Return a ratio whose product with ``dim`` timm rounds down to ``inner``."""
    ratio = inner / dim
    return ratio if int(dim * ratio) == inner else math.nextafter(ratio, math.inf)


def is_eva(size: EncoderSize, positions: Scheme) -> bool:
    """Return whether timm has this encoder only as ``Eva``."""
    like_eva = positions.timm in ("vit", None) and (size.mlp_norm or not size.key_bias)
    return positions.timm == "eva" or like_eva


def eva_state(encoder: Any, state: dict[str, Tensor], vit: nn.Module | None) -> dict[str, Tensor]:
    """Return the tensors ``state`` of an encoder for its timm model ``vit``; None: a new one."""
    frequencies = constant_frequencies(encoder.positions)
    if frequencies is not None:
        state = {**state, "rope.freqs": frequencies}
    if is_interleaved(encoder.positions.as_given()):
        state = interleaved(state, encoder.size.num_heads, back=False)
    if vit is None:
        kwargs = {**encoder.timm_kwargs, "num_classes": 0}
        with torch.device("meta"):
            vit = timm.create_model(encoder.timm_name, **kwargs)
    names = vit.state_dict().keys()
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = {name: tensor}
        if theirs(name, TIMM_EVA, names) not in names and name.split(".")[-2] in ("qkv", "fc1"):
            parts = apart(name, tensor)
        result |= {theirs(each, TIMM_EVA, names): part for each, part in parts.items()}
    # keys' zero biases and periods are not tensors there
    return {key: tensor for key, tensor in result.items() if key in names}


def odd_option(encoder: Any) -> str:
    """Return the option of an encoder that no timm model has, or none."""
    _, turn = rotation_of(encoder.positions.as_given()) or ("", {})
    usual = {"normalize": "separate", "period_range": None, "bf16_periods": False}
    if _is_directed(turn):  # exact as mixed positions, which count cells
        usual, turn = {"coordinates": "cells"}, {"coordinates": "centred", **turn}
    odd = [f"positions.rotary.{key}" for key, own in usual.items() if turn.get(key, own) != own]
    if (encoder.size.eps, encoder.layer_scale is not None) not in _NAMES:
        odd.append(f"layer_scale = {encoder.layer_scale} with norms of ε = {encoder.size.eps}")
    return next(iter(odd), "")
