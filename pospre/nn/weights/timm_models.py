"""Encoders from timm's Vision Transformers: the size by name, or a model with its weights."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import timm
import torch
from timm.layers import GluMlp, Mlp
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from pospre.errors import UserError, suggestion
from pospre.nn.encoder_interface import Original
from pospre.nn.encoder_options import EncoderOptions, Positions
from pospre.nn.positions.table import Table
from pospre.nn.sizes import CLIP, GIANT, SIZES, EncoderSize, pair
from pospre.nn.vit import Encoder
from pospre.nn.weights.names import interleaved, joined, ours, whole
from pospre.nn.weights.timm_eva import eva_positions, eva_size, turns_pairs

PREFIX = "timm:"
_HEAD = ("head.", "fc_norm.", "attn_pool.")
_BASE = SIZES["vitb16"].timm_name
_ACTIVATIONS = {"QuickGELU": "quick_gelu", "GELUTanh": "gelu_tanh"}


def timm_size(name: str) -> EncoderSize:
    """Return the size of timm's model ``name``; ``UserError`` if it is no ViT like ours."""
    name = name.removeprefix(PREFIX)
    if timm.is_model(name):
        with torch.device("meta"):
            return _size_of(timm.create_model(name, pretrained=False), name)
    hint = suggestion(name, timm.list_models("*vit*"))
    raise UserError(f"encoder.name is '{PREFIX}{name}', but timm has no model '{name}'.{hint}")


def wrap_encoder(
    vit: nn.Module, *, drop_path: float | None = None, dropout: float | None = None
) -> Encoder:
    """Return our encoder with the weights of a timm ViT, without its head.

    It also takes timm's pixel mean and deviation of this model, for ``PretrainModel``.

    Args:
        vit: from ``timm.create_model``, pre-trained or not; it is not modified, and later changes
            to it have no effect.
        drop_path: rate at which a sample skips the branches of the last block in training;
            None: that of ``vit``.
        dropout: rate after projections and positions in training; None: that of ``vit``. Its
            other dropout rates are ignored with a warning.

    Raises:
        UserError: it has parts that our encoder lacks, or computes something else.
    """
    size = _size_of(vit, type(vit).__name__)
    assert isinstance(vit, (VisionTransformer, Eva))
    image_size, patch_size = pair(vit.patch_embed.img_size), pair(size.patch_size)
    if any(side % patch for side, patch in zip(image_size, patch_size, strict=True)):
        _refuse(f"its patches {patch_size} do not divide its img_size {image_size}; give another")
    rates = _rates(vit, drop_path, dropout)
    positions: Positions = "none" if vit.pos_embed is None else "learned"
    if isinstance(vit, Eva):
        positions = eva_positions(vit, type(vit).__name__)
    theirs = _tensors_of(vit)
    has_class_token = vit.cls_token is not None
    encoder = Encoder(
        size,
        EncoderOptions(
            PREFIX + size.timm_name,
            image_size=image_size,
            patch_size=size.patch_size,
            depth=size.depth,
            channels=vit.patch_embed.proj.in_channels,
            positions=positions,
            class_token=has_class_token,
            num_registers=vit.num_prefix_tokens - has_class_token,
            layer_scale=1.0 if "blocks.0.ls1.gamma" in theirs else None,
            drop_path=rates[0],
            dropout=rates[1],
            final_norm=not isinstance(vit.norm, nn.Identity),
        ),
    )
    if "pos_embed" in theirs:
        theirs["pos_embed"] = _with_prefix(theirs["pos_embed"], encoder)
    own = {encoder.timm_name_of(key): key for key in encoder.state_dict()}
    _check_tensors({key: encoder.state_dict()[own[key]] for key in own}, theirs)
    encoder.load_state_dict({own[key]: tensor for key, tensor in theirs.items()})
    encoder.to(vit.patch_embed.proj.weight)
    if isinstance(encoder.positions, Table):
        encoder.positions.resampling = "antialiased"  # as timm does
    learns = {whole(ours(key)) for key, each in vit.named_parameters() if each.requires_grad}
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(encoder.timm_name_of(name) in learns)
    _check_tokens(encoder, vit)
    encoder.pixels_expected = pixels_of(getattr(vit, "pretrained_cfg", None), encoder.channels)
    encoder.copied_from = Original(vit)
    return encoder


def _check_parts(vit: nn.Module) -> None:
    """Raise ``UserError`` if a part with weights is neither timm's nor torch's, such as LoRA."""
    for name, part in vit.named_modules():
        home = type(part).__module__.startswith(("timm.", "torch.nn.modules."))
        used = bool(name) and not f"{name}.".startswith(_HEAD)
        if used and not home and any(True for _ in part.parameters()):
            _refuse(
                f"its {name} is a {type(part).__name__}, which is not timm's. Merge it into the "
                "weights first, or change model.encoder instead (such as by LoRA)"
            )


def pixels_of(noted: Mapping[str, Any] | None, channels: int) -> dict[str, tuple[float, ...]]:
    """Return the ``mean`` and ``std`` in timm's description of a model, if its channels match."""
    statistics = {key: (noted or {}).get(key) for key in ("mean", "std")}
    return {key: tuple(each) for key, each in statistics.items() if each and len(each) == channels}


def _rates(
    vit: VisionTransformer | Eva, drop_path: float | None, dropout: float | None
) -> tuple[float, float]:
    """Return the rates of drop path and dropout; warn about ignored rates of ``vit``."""
    block: Any = vit.blocks[-1]
    own = {
        "drop_path_rate": getattr(block.drop_path1, "drop_prob", 0.0),
        "proj_drop_rate": block.attn.proj_drop.p,
        "pos_drop_rate": vit.pos_drop.p,
        "attn_drop_rate": block.attn.attn_drop.p,
        "patch_drop_rate": getattr(vit.patch_drop, "prob", 0.0),
    }
    path, projection, position = (own.pop(key) for key in [*own][:3])
    if dropout is None and projection != position:  # ours are the same
        own.update(proj_drop_rate=projection, pos_drop_rate=position)
        projection = 0.0
    lost = ", ".join(f"{key} = {rate}" for key, rate in own.items() if rate)
    if lost:
        warnings.warn(f"wrap_encoder leaves out {lost} of this ViT", stacklevel=3)
    return path if drop_path is None else drop_path, projection if dropout is None else dropout


def _tensors_of(vit: VisionTransformer | Eva) -> dict[str, Tensor]:
    """Return the tensors by our names, with rotary positions in our layout."""
    named = {ours(k): tensor for k, tensor in vit.state_dict().items() if not k.startswith(_HEAD)}
    tensors = joined(named, "this timm model")
    if not turns_pairs(vit):
        return tensors
    block: Any = vit.blocks[0]
    return interleaved(tensors, block.attn.num_heads, back=True)


def _size_of(vit: nn.Module, name: str) -> EncoderSize:
    if isinstance(vit, VisionTransformer | Eva):
        _check_parts(vit)
    if isinstance(vit, Eva):
        return eva_size(vit, name)
    if isinstance(vit, Encoder):
        raise UserError("wrap_encoder got one of our encoders: pass it to PretrainModel directly.")
    if not isinstance(vit, VisionTransformer) or not _is_plain(vit):
        raise UserError(
            f"timm's {name} is not a plain Vision Transformer (VisionTransformer of timm with a "
            "two-layer MLP or SwiGLU), as the encoder must be. Try vit_small_patch16_224."
        )
    block: Any = vit.blocks[0]
    kind: dict[str, Any] = {
        "swiglu": isinstance(block.mlp, GluMlp),
        "pre_norm": not isinstance(vit.norm_pre, nn.Identity),
        "qkv_bias": block.attn.qkv.bias is not None,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "eps": block.norm1.eps,
        "activation": _ACTIVATIONS.get(type(block.mlp.act).__name__, "gelu"),
    }
    patch = vit.patch_embed.patch_size
    dim, depth, heads = vit.embed_dim, len(vit.blocks), block.attn.num_heads
    hidden = block.mlp.fc1.out_features
    for size in SIZES.values():
        same = (pair(size.patch_size), size.embed_dim, size.depth) == (patch, dim, depth)
        alike = all(getattr(size, key) == value for key, value in kind.items())
        if same and alike and (size.num_heads, size.hidden_dim) == (heads, hidden):
            return size
    base = GIANT if kind["swiglu"] else CLIP if kind["pre_norm"] else _BASE
    return EncoderSize(base, patch, dim, depth, heads, mlp_ratio=hidden / dim, **kind)


def _is_plain(vit: VisionTransformer) -> bool:
    block = vit.blocks[0]
    if not isinstance(vit.patch_embed.proj, nn.Conv2d) or not isinstance(block, Block):
        return False
    mlp = block.mlp
    return type(mlp) is Mlp or (isinstance(mlp, GluMlp) and not mlp.gate_last)


def _with_prefix(table: Tensor, encoder: Encoder) -> Tensor:
    """Return a table with a row for every prefix token; some timm tables have none of them."""
    missing = encoder.num_prefix_tokens + encoder.num_patches - table.shape[1]
    if missing != encoder.num_prefix_tokens:
        return table
    return torch.cat([table.new_zeros(1, missing, table.shape[2]), table], dim=1)


def _check_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Raise ``UserError`` naming tensors that only one side has, or whose shapes differ."""
    shared = ours.keys() & theirs.keys()
    other = [key for key in shared if ours[key].shape != theirs[key].shape]
    for what, keys in (
        ("has tensors that our encoder lacks", theirs.keys() - ours.keys()),
        ("lacks tensors that our encoder has", ours.keys() - theirs.keys()),
        ("has tensors of other shapes than our encoder", other),
    ):
        if keys:
            _refuse(f"it {what}: {', '.join(sorted(keys)[:3])}")


def _refuse(reason: str) -> NoReturn:
    raise UserError(
        f"this timm model cannot be the encoder: {reason}. Plain ViTs can, such as "
        "vit_small_patch16_224."
    )


@torch.no_grad()
def _check_tokens(encoder: Encoder, vit: VisionTransformer | Eva) -> None:
    """Raise ``UserError`` unless both give the same tokens for an image."""
    size = (1, encoder.channels, *encoder.image_size)
    weight = encoder.get_parameter("patch_embed.proj.weight")
    image = torch.linspace(-2, 2, math.prod(size)).view(size).to(weight)
    training = vit.training
    theirs = vit.eval().forward_features(image)
    vit.train(training)
    ours = encoder.eval()(image)
    encoder.train()
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
        _refuse("with the same weights its tokens differ (activation, norms or positions)")
