"""timm's ``Eva``: EVA, EVA-02, DINOv3 and rope-vit, of whose kind an encoder of ours may be."""

import math
from typing import Any

import timm
import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.layers.attention import AttentionRope
from timm.models.eva import Eva, EvaAttention, EvaBlock
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.positions import Positions
from pospre.nn.sizes import EncoderSize, pair
from pospre.nn.weight_names import TIMM_EVA, apart, theirs

_NAMES = {1e-5: "vit_small_patch16_dinov3_qkvb", 1e-6: "vit_small_patch16_rope_224"}
"""By ε of the norms, the one thing that arguments of timm's do not say."""


def eva_size(vit: Eva, name: str) -> EncoderSize:
    """Return the size of a model of timm's.

    Raises:
        UserError: it has parts that our encoder does not have.
    """
    block: Any = vit.blocks[0]
    if type(block) is not EvaBlock or type(block.mlp) not in (Mlp, GluMlp, SwiGLU):
        raise UserError(f"timm's {name} normalises after its branches; our encoder does before.")
    attention, mlp = block.attn, block.mlp
    if not isinstance(attention.norm, nn.Identity):
        raise UserError(f"timm's {name} normalises within attention, which our encoder does not.")
    gated = not isinstance(mlp, Mlp)
    inner = mlp.fc2.in_features
    return EncoderSize(
        _NAMES.get(block.norm1.eps, _NAMES[1e-6]),
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


def eva_positions(vit: Eva) -> Positions:
    """Return the positions of a model of timm's."""
    raise NotImplementedError


def is_interleaved(vit: nn.Module) -> bool:
    """Return whether it turns channels 2i and 2i + 1 together; ours turns i and i + D/2."""
    return getattr(vit, "rope", None) is not None and not vit.blocks[0].attn.rotate_half


def _has_bias(attention: Any) -> bool:
    """Return whether queries and values have a bias; timm keeps it in three ways."""
    if isinstance(attention, EvaAttention) and attention.qkv is not None:
        return attention.q_bias is not None
    return (attention.q_proj if attention.qkv is None else attention.qkv).bias is not None


def eva_model(
    size: EncoderSize, options: dict[str, Any], rotation: dict[str, Any], *, table: bool
) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments with which ``timm.create_model`` builds an encoder.

    Args:
        size: of the encoder.
        options: see ``timm_model``.
        rotation: arguments of its rotary positions; empty: it has none.
        table: whether it has a table of positions, too.
    """
    inner = size.hidden_dim // 2 if size.swiglu else size.hidden_dim
    named = ("img_size", "patch_size", "depth", "in_chans", "class_token", "init_values")
    return _NAMES.get(size.eps, _NAMES[1e-6]), {
        **{key: options[key] for key in named},
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
        "use_abs_pos_emb": table,
        "use_rot_pos_emb": bool(rotation),
        "dynamic_img_size": True,
        **rotation,
    }


def _ratio(inner: int, dim: int) -> float:
    """Return the number whose product with ``dim`` timm rounds down to ``inner``."""
    ratio = inner / dim
    return ratio if int(dim * ratio) == inner else math.nextafter(ratio, math.inf)


def eva_state(state: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return an encoder's tensors as a model of timm's takes them.

    Args:
        state: by our names.
        names: of its tensors; which of them are parts depends on the model.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = {name: tensor}
        if theirs(name, TIMM_EVA) not in names and name.rsplit(".", 2)[-2] in ("qkv", "fc1"):
            parts = apart(name, tensor)
        found |= {theirs(each, TIMM_EVA): part for each, part in parts.items()}
    return {key: tensor for key, tensor in found.items() if key in names}  # k_bias is no tensor


def eva_names(name: str, kwargs: dict[str, Any]) -> set[str]:
    """Return the names of the tensors of timm's model, without its head."""
    with torch.device("meta"):
        return {*timm.create_model(name, **{**kwargs, "num_classes": 0}).state_dict()}
