"""A rotary encoder as transformers' ``DINOv3ViTModel``: its configuration and tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from pospre.exporting.timm_encoder import Parts
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.foreign import has_table, rotation_of
from pospre.nn.vit import Encoder
from pospre.nn.weight_names import HF_DINOV3, apart, theirs

KIND = "DINOv3ViTModel"
_DRAWN = ("shift", "jitter", "rescale")


def fits(encoder: PatchEncoder) -> bool:
    """Return whether the network computes the same as an encoder."""
    positions = encoder.positions.as_given()
    name, options = rotation_of(positions) or ("", {})
    if not isinstance(encoder, Encoder) or name != "rotary" or has_table(positions):
        return False
    size = encoder.size
    return (
        {*options} <= {"base", *_DRAWN}
        and encoder.has_class_token
        and not isinstance(encoder.norm, nn.Identity)
        and not (size.qk_norm or size.mlp_norm or size.pre_norm)
        and size.activation == "gelu"
        and len({*encoder.patch_size}) == 1
    )


def config(parts: Parts) -> dict[str, Any]:
    """Return the arguments of its configuration."""
    encoder = parts.model.encoder
    size = encoder.size
    _, options = rotation_of(encoder.positions.as_given()) or ("", {})
    return {
        "hidden_size": encoder.embed_dim,
        "intermediate_size": size.hidden_dim // (2 if size.swiglu else 1),
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": size.num_heads,
        "num_register_tokens": encoder.num_prefix_tokens - 1,
        "num_channels": encoder.channels,
        "patch_size": encoder.patch_size[0],
        "image_size": max(parts.image_size),
        "layer_norm_eps": size.eps,
        "hidden_act": "silu" if size.swiglu else "gelu",
        "use_gated_mlp": size.swiglu,
        "query_bias": size.qkv_bias,
        "key_bias": size.qkv_bias and size.key_bias,
        "value_bias": size.qkv_bias,
        "rope_theta": options.get("base") or 100.0,
        **{f"pos_embed_{key}": options.get(key) for key in _DRAWN},
    }


def tensors(parts: Parts) -> dict[str, Tensor]:
    """Return the encoder's tensors under its names; what is not scaled is scaled by 1."""
    encoder = parts.model.encoder
    dim, own = encoder.embed_dim, encoder.state_dict()
    for block in range(encoder.depth):
        for branch in (1, 2):
            own.setdefault(f"blocks.{block}.ls{branch}.gamma", torch.ones(dim))
    found = {"embeddings.mask_token": torch.zeros(1, 1, dim)}  # for masks: none are given
    if encoder.num_prefix_tokens == 1:
        own["reg_token"] = torch.zeros(1, 0, dim)
    for name, tensor in own.items():
        pieces = {name: tensor}
        if ".attn.qkv." in name or (".mlp.fc1." in name and encoder.size.swiglu):
            pieces = apart(name, tensor)
        elif ".mlp.fc1." in name:
            pieces = {name.replace("fc1", "value"): tensor}
        for each, piece in pieces.items():
            if not (each.endswith("attn.k.bias") and not encoder.size.key_bias):
                found[theirs(each, HF_DINOV3)] = piece
    return found
