"""Encoder sizes, and their timm models."""

from dataclasses import dataclass
from typing import Any

from pospre.nn.positions.scheme import Scheme

RELATIVE_NAME = "vit_relpos_base_patch16_224"
GIANT = "vit_giant_patch14_dinov2"
CLIP = "vit_base_patch16_clip_224"
_DEFAULTS: dict[str, dict[str, Any]] = {  # of timm, where not the usual ones
    GIANT: {"img_size": 518, "init_values": 1e-5},
    CLIP: {"pre_norm": True},
}


@dataclass(frozen=True)
class EncoderSize:
    """The shape of a Vision Transformer, and its timm name.

    Attributes:
        mlp_norm: whether the MLP normalises before its second layer (EVA-02's base and large).
        swiglu: whether the MLP is SiLU(gate) · value, both from its first layer (DINOv2's giant).
        pre_norm: whether tokens are also normalised before the first block (CLIP); the patch
            embedding then has no bias.
        qkv_bias: whether attention has biases.
        key_bias: whether keys have one. BEiT and DINOv3 keep it at 0. With rotary positions it
            would not cancel in the softmax.
        qk_norm: whether queries and keys are normalised per head before rotation.
        activation: the MLP's activation, by timm's name; gates use SiLU.
    """

    timm_name: str
    patch_size: int | tuple[int, int]
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    swiglu: bool = False
    mlp_norm: bool = False
    pre_norm: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    qk_norm: bool = False
    eps: float = 1e-6
    activation: str = "gelu"

    @property
    def hidden_dim(self) -> int:
        """Width of the MLP's first layer."""
        return int(self.embed_dim * self.mlp_ratio)


SIZES = {
    "vit_tiny16": EncoderSize("vit_tiny_patch16_224", 16, 192, 12, 3),
    "vits16": EncoderSize("vit_small_patch16_224", 16, 384, 12, 6),
    "vitb16": EncoderSize("vit_base_patch16_224", 16, 768, 12, 12),
    "vitl16": EncoderSize("vit_large_patch16_224", 16, 1024, 24, 16),
    "vith14": EncoderSize("vit_huge_patch14_224", 14, 1280, 32, 16),
    "vit1b16": EncoderSize("vit_huge_patch14_224", 16, 1536, 48, 24),
    "vit5b16": EncoderSize("vit_huge_patch14_224", 16, 3072, 48, 32),
    "vitg14": EncoderSize(GIANT, 14, 1536, 40, 24, mlp_ratio=2.66667 * 2, swiglu=True),
    # MP3's for speech: one frame of 40 coefficients is a patch; timm has the first of this name
    "speech8": EncoderSize("vit_tiny_patch16_224", (1, 40), 32, 8, 4, mlp_ratio=2.0),
}


def timm_model(
    size: EncoderSize, options: dict[str, Any], positions: Scheme
) -> tuple[str, dict[str, Any]]:
    """Return the model name and the arguments for ``timm.create_model``.

    ``options`` are the arguments of its ``VisionTransformer``, by timm's names.
    """
    if positions.timm in ("relpos", "shared_relpos"):
        return RELATIVE_NAME, _relative(size, options, shared=positions.timm == "shared_relpos")
    return size.timm_name, _differences(size, options)


def _differences(size: EncoderSize, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model(size.timm_name)`` for this encoder."""
    known = (*SIZES.values(), EncoderSize(CLIP, 16, 768, 12, 12))
    timms = next(one for one in known if one.timm_name == size.timm_name)
    usual = {
        "img_size": 224,
        "patch_size": timms.patch_size,
        "depth": timms.depth,
        "in_chans": 3,
        "class_token": True,
        "reg_tokens": 0,
        "init_values": None,
        "final_norm": True,
        "pre_norm": False,
        "qkv_bias": True,
        "qk_norm": False,
        "act_layer": "gelu",
        **_DEFAULTS.get(size.timm_name, {}),
    }
    different = {key: options[key] for key, value in usual.items() if options[key] != value}
    for key in ("embed_dim", "num_heads", "mlp_ratio"):
        if getattr(size, key) != getattr(timms, key):
            different[key] = getattr(size, key)
    if not options["class_token"]:
        different["global_pool"] = ""
    return different


def _relative(size: EncoderSize, options: dict[str, Any], *, shared: bool) -> dict[str, Any]:
    """Return the arguments of ``timm.create_model(RELATIVE_NAME)`` for this encoder."""
    return {
        "img_size": options["img_size"],
        "patch_size": options["patch_size"],
        "in_chans": options["in_chans"],
        "embed_dim": size.embed_dim,
        "depth": options["depth"],
        "num_heads": size.num_heads,
        "qkv_bias": True,
        "mlp_ratio": size.mlp_ratio,
        "class_token": options["class_token"],
        "init_values": options["init_values"] or 0.0,
        "global_pool": "token" if options["class_token"] else "",
        "fc_norm": not options["final_norm"],
        "rel_pos_type": "bias",
        "shared_rel_pos": shared,
    }


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) from one side or a pair."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
