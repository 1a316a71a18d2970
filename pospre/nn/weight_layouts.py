"""Published weights of Vision Transformers: whose file it is, and its tensors under timm's names.

Codes differ in three things: where in the file the encoder is (MAE: ``model``; DINO, DINOv2:
``teacher`` and ``student``; I-JEPA, StoP: ``encoder`` and ``target_encoder``), what else is there
(decoders, heads, predictors), and the names of some tensors.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pospre.errors import UserError, printable
from pospre.nn.positions import timm_name
from pospre.nn.positions.table import Resampling

KNOWN = (
    "MAE, SimMIM, DropPos, DINO, iBOT, DINOv2 (also with registers or in chunks), I-JEPA, StoP, "
    "BEiT, DeiT, any plain ViT of timm, and ViTModel and Dinov2Model of transformers"
)
WITHOUT_POSITIONS = ",positions=none"
"""Behind a file's name: its encoder was trained without positions."""
_PATCHES = ("patch_embed.proj.weight", "embeddings.patch_embeddings.projection.weight")
_TEACHER = re.compile(r"(^|[._])(teacher|target|momentum|ema)")
_BESIDE = re.compile(
    r"decoder|(?:embeddings\.)?mask_token|mask_pos|lm_head|predictor|pooler|classifier|dino_head"
)
_DINO = re.compile(r"(^|\.)(student|teacher)\.(module\.)?backbone\.$")
_ROTARY = re.compile(r"rope|storage_tokens|freqs|periods")
_POSITIONS = re.compile(r"pos_embed|rel_pos|relative_position_bias|offset_bias")
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.", ""),
        (r"^encoder\.layer\.", "blocks."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"^layernorm\.", "norm."),
        (r"\.attention\.output\.dense\.", ".attn.proj."),
        (r"\.attention\.attention\.", ".attn."),
        (r"\.(?:intermediate\.dense|mlp\.weights_in|mlp\.w12)\.", ".mlp.fc1."),
        (r"\.(?:output\.dense|mlp\.weights_out|mlp\.w3)\.", ".mlp.fc2."),
        (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
        (r"\.gamma_([12])$", r".ls\1.gamma"),
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # DINOv2's chunks: the second number counts on
        (r"^register_tokens$", "reg_token"),
        (r"^(blocks\.\d+\.attn\.)(relative_position_bias_table)$", r"\1rel_pos.\2"),
        (r"^rel_pos_bias\.", "shared_rel_pos."),
    )
]


class Named(NamedTuple):
    """An encoder's tensors under timm's names.

    Attributes:
        tensors: of the encoder, or of a classifier on it.
        left_out: the file's names of what belongs to neither.
        origin: where in the file they were, such as ``teacher.backbone``; empty: it held them bare.
        resampling: how the code that wrote the file reads its positions at another grid; None
            where names do not tell.
    """

    tensors: dict[str, Tensor]
    left_out: list[str]
    origin: str
    resampling: Resampling | None


def timm_names(content: Any, name: str, which: Literal["student", "teacher"], key: str) -> Named:
    """Return the encoder in what a file of weights holds.

    Args:
        content: of the file.
        name: of the file, for errors.
        which: encoder, where there are a trained one and one that follows it. A file that holds
            the teacher's alone gives that one.
        key: what asks for ``which``, for errors.

    Raises:
        UserError: there is no encoder of a known layout, or not that one.
    """
    flat = _flat(content) if isinstance(content, Mapping) else {}
    ends = [(path, end) for path in flat for end in _PATCHES if path.endswith(end)]
    starts = [path.removesuffix(end) for path, end in ends]
    if not starts:
        raise UserError(
            f"{name} holds no Vision Transformer of a known layout; its first tensors: "
            f"{', '.join([*flat][:3]) or 'none'}. Known layouts: {KNOWN}."
        )
    start = _choose(starts, name, which, key)
    inside = {path.removeprefix(start): t for path, t in flat.items() if path.startswith(start)}
    rotary = next((path for path in inside if _ROTARY.search(path)), None)
    if rotary is not None:
        raise UserError(
            f"{name} holds '{rotary}': its encoder (DINOv3, EVA-02) has no position table, it "
            "rotates queries and keys (RoPE), which ours does not do."
        )
    tensors = {path: t for path, t in inside.items() if not _BESIDE.match(path)}
    left_out = [path for path in flat if path.removeprefix(start) not in tensors]
    return Named(_renamed(tensors), left_out, start.rstrip("."), _resampling(inside, start))


def _resampling(inside: Mapping[str, Tensor], start: str) -> Resampling | None:
    """Return how DINO, iBOT and DINOv2 read their positions at another grid."""
    if any(path.endswith("register_tokens") for path in inside):
        return "antialiased"
    masks = [tensor for path, tensor in inside.items() if path.endswith("mask_token")]
    is_dinov2 = any(tensor.ndim == 2 for tensor in masks)  # others have three dimensions
    return "offset" if is_dinov2 or _DINO.search(start) else None


def _flat(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file, and those of the dicts in it, by dotted names."""
    found: dict[str, Tensor] = {}
    for key, value in content.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        for path, tensor in ((str(key), value), *((f"{key}.{k}", v) for k, v in inner)):
            if isinstance(tensor, Tensor):
                found[path] = tensor
    return found


def _choose(starts: list[str], name: str, which: str, key: str) -> str:
    """Return the start of the wanted encoder's names."""
    teachers = [start for start in starts if _TEACHER.search(start)]
    others = [start for start in starts if start not in teachers]
    wanted = teachers if which == "teacher" or not others else others
    if not wanted:
        raise UserError(f"{key} = teacher, but {name} holds one encoder; use student")
    if len(wanted) > 1:
        raise UserError(f"{name} holds several encoders: {', '.join(wanted)}; save one alone")
    return wanted[0]


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}  # of a qkv tensor
    for path, tensor in tensors.items():
        path = timm_name(path)
        for pattern, name in _RENAMED:
            path = pattern.sub(name, path)
        split = re.fullmatch(r"(.*\.attn\.)(query|key|value)\.(weight|bias)", path)
        beit = re.fullmatch(r"(.*\.attn\.)([qv])_bias", path)
        if split:
            parts.setdefault(f"{split[1]}qkv.{split[3]}", {})[split[2][0]] = tensor
        elif beit:
            parts.setdefault(f"{beit[1]}qkv.bias", {})[beit[2]] = tensor
        elif not path.endswith("relative_position_index"):  # follows from the grid
            found[path] = tensor
    for path, part in parts.items():
        none = torch.zeros_like(part["q"])  # BEiT's keys have no bias
        found[path] = torch.cat([part.get(letter, none) for letter in "qkv"])
    if "register_tokens" in tensors and "pos_embed" in found:
        found["pos_embed"] = _without_registers(found["pos_embed"], found["reg_token"].shape[1])
    return found


def _without_registers(table: Tensor, registers: int) -> Tensor:
    """Return DINOv2's table, which has a row for the class token, with one of zeros a register."""
    zeros = table.new_zeros(1, registers, table.shape[2])
    return torch.cat([table[:, :1], zeros, table[:, 1:]], dim=1)


def check_positions(tensors: Mapping[str, Tensor], name: str, *, told_none: str | None) -> None:
    """Raise ``UserError`` unless an encoder's positions are known.

    That none are in the file says nothing: rotary positions and distances to attention are no
    tensors.

    Args:
        tensors: of the encoder, under timm's names.
        name: of their file, for errors.
        told_none: the words that said that it was trained without positions; None: nothing did.
    """
    found = next((key for key in tensors if _POSITIONS.search(key)), None)
    if told_none is not None and found is not None:
        raise UserError(f"{name} holds positions ('{found}'); leave '{told_none}' out.")
    if told_none is None and found is None:
        raise UserError(
            f"{name} holds no positions that ours could have ('pos_embed', a relative position "
            "bias). Files of encoders that rotate queries and keys (RoPE: DINOv3, rope-vit) or add "
            "distances to attention (ALiBi) look like this, and ours does neither. If this one "
            f"was trained without positions, say so: {name}{WITHOUT_POSITIONS}"
        )


def with_prefix_rows(table: Tensor, class_token: bool, registers: int, *, bare: bool) -> Tensor:
    """Return a position table (1, P+N, D) with a row for every prefix token.

    Some of timm's have no row for registers, or none for the class token either: these get zeros.
    What is no square grid in any of these readings is given back as it is.

    Args:
        table: (1, rows, D).
        class_token: whether the encoder has one.
        registers: how many it has.
        bare: whether the table may have rows for patches alone. Without registers the number of
            rows does not tell: 3×3 patches have as many as 2×4 patches and a class token.
    """
    prefix = class_token + registers
    if registers and not bool(table[0, int(class_token) : prefix].any()):
        return table  # registers have no positions
    for there in dict.fromkeys((int(class_token), *((0,) if bare else ()), prefix)):
        if _is_square(table.shape[1] - there):
            head, patches = table[:, :there], table[:, there:]
            zeros = table.new_zeros(1, prefix - there, table.shape[2])
            return torch.cat([head, zeros, patches], dim=1)
    return table


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def shortened(names: Iterable[str]) -> str:
    """Write names as a short list: all of them, or the first, the last and their number."""
    keys = [printable(name) for name in names]
    return ", ".join(keys) if len(keys) < 5 else f"{keys[0]} … {keys[-1]} ({len(keys)})"
