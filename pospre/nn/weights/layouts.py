"""Published weight files of Vision Transformers: detect the layout, return timm's names.

Files differ in three ways. The encoder has a different key (MAE: ``model``; DINO, DINOv2:
``teacher`` and ``student``; I-JEPA, StoP: ``encoder`` and ``target_encoder``). There may be other
parts (decoders, heads, predictors). Some tensors have other names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pospre.errors import UserError, printable
from pospre.nn.encoder_options import Positions
from pospre.nn.positions.foreign import as_text, dinov3, eva_02, rope_vit
from pospre.nn.positions.scheme import Resampling
from pospre.nn.weights.address import POSITIONS
from pospre.nn.weights.names import joined, ours

KNOWN = (
    "MAE, Pixio, SimMIM, DropPos, DINO, iBOT, DINOv2 (also with registers or in chunks), DINOv3, "
    "I-JEPA, StoP, BEiT, EVA-02, rope-vit, DeiT, any plain or rotary ViT of timm, and ViTModel, "
    "PixioModel, Dinov2Model and DINOv3ViTModel of transformers"
)
_PATCHES = (
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
)
_TEACHER = re.compile(r"(^|[._])(teacher|target|momentum|ema)")
_BESIDE = re.compile(
    r"decoder|(?:embeddings\.)?mask_token|mask_pos|lm_head|predictor|pooler|classifier|dino_head"
    r"|local_cls_norm"
)
_DINO = re.compile(r"(^|\.)(student|teacher)\.(module\.)?backbone\.$")
_DINOV3 = re.compile(r"storage_tokens|rope_embed\.|layer\.\d+\.attention\.o_proj\.")
_POSITIONS = re.compile(
    r"pos_embed|rel_pos|relative_position_bias|offset_bias|^rope\.|^positions\."
)
_DERIVED = re.compile(
    r"relative_position_index$|(^|\.)rope\.freqs_(cos|sin)$|^freqs_t_[xy]$|\.bias_mask$"
)
"""Tensors that follow from the grid or the kind of network."""


class Named(NamedTuple):
    """An encoder's tensors under our names.

    Attributes:
        tensors: tensors of the encoder, or of a classifier on it, in the layout of the file.
        left_out: the file's names of all other tensors.
        origin: their key in the file, such as ``teacher.backbone``; empty: top level.
        resampling: how the original code resamples positions; None if names do not show it.
        positions: of codes with rotary positions; None: tensors show them, or nothing does.
    """

    tensors: dict[str, Tensor]
    left_out: list[str]
    origin: str
    resampling: Resampling | None
    positions: Positions | None


def timm_names(content: Any, name: str, which: Literal["student", "teacher"], key: str) -> Named:
    """Return the encoder in the content of the file ``name``; errors name the option ``key``.

    With several, ``which`` chooses between the trained one and its teacher. If the file has only
    the teacher's, it is taken.

    Raises:
        UserError: no encoder of a known layout, or not the requested one.
    """
    flat = _flat(content) if isinstance(content, Mapping) else {}
    ends = [(path, end) for path in flat for end in _PATCHES if path.endswith(end)]
    starts = [path.removesuffix(end) for path, end in ends]
    if not starts:
        raise UserError(
            f"{name} holds no Vision Transformer of a known layout; its first tensors: "
            f"{', '.join([*flat][:3]) or 'none'}. Known layouts: {KNOWN}. Of a training "
            "of your own, save the encoder alone: torch.save(model.timm_state(), 'encoder.pth')."
        )
    start = _choose(starts, name, which, key)
    inside = {path.removeprefix(start): t for path, t in flat.items() if path.startswith(start)}
    tensors = {path: t for path, t in inside.items() if not _BESIDE.match(path)}
    left_out = [path for path in flat if path.removeprefix(start) not in tensors]
    named = _named(tensors, name)
    origin, positions = start.rstrip("."), _rotary(inside, named, name)
    return Named(named, left_out, origin, _resampling(inside, start), positions)


def _named(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    kept = {ours(path): t for path, t in tensors.items() if not _DERIVED.search(path)}
    named_tensors = joined(kept, name)
    for path, mask in tensors.items():  # DINOv3 multiplies the bias by it: keys have none
        if not path.endswith("bias_mask"):
            continue
        if not bool(torch.isfinite(mask).all()):
            raise UserError(
                f"{name}: '{path}' holds values that are not finite, so DINOv3's code has no "
                "features. Its training sets it to 1 for queries and values and 0 for keys."
            )
        if (key := ours(path).removesuffix("_mask")) in named_tensors:
            named_tensors[key] = named_tensors[key] * mask.to(named_tensors[key].dtype)
    if "cls_token" in named_tensors and named_tensors["cls_token"].shape[1] > 1:
        _split_class_tokens(named_tensors)
    if "register_tokens" in tensors and "pos_embed" in named_tensors:
        table, count = named_tensors["pos_embed"], named_tensors["reg_token"].shape[1]
        zeros = table.new_zeros(1, count, table.shape[2])  # DINOv2's registers have no rows
        named_tensors["pos_embed"] = torch.cat([table[:, :1], zeros, table[:, 1:]], dim=1)
    return named_tensors


def _split_class_tokens(tensors: dict[str, Tensor]) -> None:
    """Make Pixio's class tokens one class token and registers, which include their positions."""
    tokens, table = tensors["cls_token"], tensors["pos_embed"]
    others = slice(1, tokens.shape[1])
    tensors["cls_token"] = tokens[:, :1]
    tensors["reg_token"] = tokens[:, others] + table[:, others]
    tensors["pos_embed"] = table.clone()
    tensors["pos_embed"][:, others] = 0


def _rotary(inside: Mapping[str, Tensor], named: dict[str, Tensor], name: str) -> Positions | None:
    """Return the positions of codes with rotary ones, recognised by their tensors."""
    table = "pos_embed" in named
    if "rope.freqs" in named:
        return rope_vit(mixed=True, table=table)
    if any(path.startswith("rope.freqs_") for path in inside):
        return eva_02(table=table)
    is_separate = "blocks.0.attn.q_bias" in inside or "blocks.0.attn.q_proj.bias" in inside
    if table and is_separate and is_gated(named):  # EVA-02 of timm
        return eva_02(table=True)
    has_prefix = {"cls_token", "reg_token"} <= named.keys() and not table
    is_timms = has_prefix and "blocks.0.attn.qkv.bias" not in inside
    if any(map(_DINOV3.match, inside)) or (is_timms and "blocks.0.ls1.gamma" in named):
        rotary = dinov3(named.pop("rope.periods", None))
        if rotary is not None:
            return rotary
        raise UserError(
            f"{name} has rotary periods other than DINOv3's 100^(4i/D); save it without "
            f"'rope_embed.periods' and give them: FILE{POSITIONS}{{rotary: {{base: …}}}}"
        )
    return None


def _resampling(inside: Mapping[str, Tensor], start: str) -> Resampling | None:
    """Return the resampling method of DINO, iBOT and DINOv2, recognised by their tensors."""
    if any(path.endswith("register_tokens") for path in inside):
        return "antialiased"
    masks = [tensor for path, tensor in inside.items() if path.endswith("mask_token")]
    is_dinov2 = any(tensor.ndim == 2 for tensor in masks)  # others have three dimensions
    return "offset" if is_dinov2 or _DINO.search(start) else None


def _flat(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return all tensors of a file and its nested dicts, by dotted names."""
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        for path, tensor in ((str(key), value), *((f"{key}.{k}", v) for k, v in inner)):
            if isinstance(tensor, Tensor):
                tensors[path] = tensor
    return tensors


def _choose(starts: list[str], name: str, which: str, key: str) -> str:
    """Return the name prefix of the requested encoder."""
    teachers = [start for start in starts if _TEACHER.search(start)]
    others = [start for start in starts if start not in teachers]
    wanted = teachers if which == "teacher" or not others else others
    if not wanted:
        raise UserError(f"{key} = teacher, but {name} holds one encoder; use student")
    if len(wanted) > 1:
        raise UserError(f"{name} holds several encoders: {', '.join(wanted)}; save only one")
    return wanted[0]


def check_positions(
    tensors: Mapping[str, Tensor], name: str, known: Positions | None, given: Positions | None
) -> Positions | None:
    """Return an encoder's positions when its tensors do not show them.

    Missing tensors prove nothing: rotary positions and distance biases have none. ``known`` were
    inferred from tensor names, ``given`` comes from the user.

    Raises:
        UserError: positions are unknown, or those given contradict the file ``name``.
    """
    key = next(iter(position_names(tensors)), None)
    if given == "none" and (key is not None or known is not None):
        raise UserError(f"{name} holds positions ('{key or 'rope'}'); leave '{POSITIONS}none' out.")
    if given is not None and known is not None and given != known:
        raise UserError(f"{name} has positions {known}; leave '{POSITIONS}…' out.")
    if given is None and known is None and key is None:
        raise UserError(
            f"{name} holds no positions: no table, no bias, and no sign of rotary positions. "
            "Say which positions its encoder has: RoPE-ViT's axial ones "
            f"'{name}{POSITIONS}{as_text(rope_vit())}' or timm:NAME,FILE; or, if it was trained "
            f"without positions, {name}{POSITIONS}none"
        )
    return given if known is None else known


def position_names(tensors: Iterable[str]) -> list[str]:
    """Return the names, among timm's and ours, of tensors of positions."""
    return [key for key in tensors if _POSITIONS.search(key)]


def shortened(names: Iterable[str]) -> str:
    """Write names as a short list: all of them, or the first, the last and their count."""
    keys = [printable(name) for name in names]
    return ", ".join(keys) if len(keys) < 5 else f"{keys[0]} … {keys[-1]} ({len(keys)})"


def is_gated(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether an encoder's MLPs are SwiGLU."""
    first, last = (tensors.get(f"blocks.0.mlp.fc{number}.weight") for number in (1, 2))
    return first is not None and last is not None and len(first) != last.shape[1]
