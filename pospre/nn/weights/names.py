"""Tensor names of published Vision Transformers: a table for each code that we also write.

A table maps their names to ours; ``*`` matches one part between dots. Ours are timm's names of its
plain ViT. Tensors that a code splits have extra names: ``attn.q``, ``attn.k``, ``attn.v`` form
``attn.qkv``, and ``mlp.gate`` and ``mlp.value`` form ``mlp.fc1``. ``joined`` joins such parts, and
``apart`` splits them. Names that are not in a table are the same in both.

MAE, DINO, iBOT, I-JEPA, StoP, DropPos, DeiT and SimMIM have timm's names, except those of BEiT.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from pospre.errors import UserError

Names = dict[str, str]

TIMM_EVA: Names = {
    "blocks.*.gamma_1": "blocks.*.ls1.gamma",
    "blocks.*.gamma_2": "blocks.*.ls2.gamma",
    "blocks.*.attn.q_bias": "blocks.*.attn.q.bias",
    "blocks.*.attn.v_bias": "blocks.*.attn.v.bias",
    "blocks.*.attn.q_proj.*": "blocks.*.attn.q.*",
    "blocks.*.attn.k_proj.*": "blocks.*.attn.k.*",
    "blocks.*.attn.v_proj.*": "blocks.*.attn.v.*",
    "blocks.*.mlp.fc1_g.*": "blocks.*.mlp.gate.*",
    "blocks.*.mlp.fc1_x.*": "blocks.*.mlp.value.*",
}
"""timm's EVA, EVA-02, DINOv3 and RoPE-ViT; each model has some of them. BEiT has the first four."""
TABLE = "relative_position_bias_table"
SHARED = f"shared_rel_pos.{TABLE}"
"""Distance biases: of a block, and of all blocks."""
_OURS: Names = {
    "positions.pos_embed": "pos_embed",
    "positions.tables.*": f"blocks.*.attn.rel_pos.{TABLE}",
    "positions.freqs": "rope.freqs",
    "positions.rotation.freqs": "rope.freqs",
    "positions.table": SHARED,
}
"""Our schemes of positions; as timm names such tensors, so do we in files."""
_OTHERS: Names = {
    f"blocks.*.attn.{TABLE}": f"blocks.*.attn.rel_pos.{TABLE}",  # BEiT
    f"rel_pos_bias.{TABLE}": SHARED,  # BEiT
    "freqs": "rope.freqs",  # RoPE-ViT
    "register_tokens": "reg_token",  # DINOv2
    "storage_tokens": "reg_token",  # DINOv3
    "rope_embed.periods": "rope.periods",  # DINOv3
    "blocks.*.mlp.w12.*": "blocks.*.mlp.fc1.*",  # DINOv2, EVA-02
    "blocks.*.mlp.w1.*": "blocks.*.mlp.gate.*",  # DINOv3, EVA-02
    "blocks.*.mlp.w2.*": "blocks.*.mlp.value.*",  # DINOv3, EVA-02
    "blocks.*.mlp.w3.*": "blocks.*.mlp.fc2.*",  # DINOv2, DINOv3, EVA-02
    "blocks.*.mlp.ffn_ln.*": "blocks.*.mlp.norm.*",  # EVA-02
}
_HF_EMBEDDINGS: Names = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
}
HF_VIT: Names = {
    **_HF_EMBEDDINGS,
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.*": "patch_embed.proj.*",
    "encoder.layer.*.layernorm_before.*": "blocks.*.norm1.*",
    "encoder.layer.*.layernorm_after.*": "blocks.*.norm2.*",
    "encoder.layer.*.attention.attention.query.*": "blocks.*.attn.q.*",
    "encoder.layer.*.attention.attention.key.*": "blocks.*.attn.k.*",
    "encoder.layer.*.attention.attention.value.*": "blocks.*.attn.v.*",
    "encoder.layer.*.attention.output.dense.*": "blocks.*.attn.proj.*",
    "encoder.layer.*.intermediate.dense.*": "blocks.*.mlp.fc1.*",
    "encoder.layer.*.output.dense.*": "blocks.*.mlp.fc2.*",
    "layernorm.*": "norm.*",
}
"""transformers' ViTModel and IJepaModel."""
HF_DINOV2: Names = {
    "encoder.layer.*.norm1.*": "blocks.*.norm1.*",
    "encoder.layer.*.norm2.*": "blocks.*.norm2.*",
    "encoder.layer.*.layer_scale1.lambda1": "blocks.*.ls1.gamma",
    "encoder.layer.*.layer_scale2.lambda1": "blocks.*.ls2.gamma",
    "encoder.layer.*.mlp.fc1.*": "blocks.*.mlp.fc1.*",
    "encoder.layer.*.mlp.fc2.*": "blocks.*.mlp.fc2.*",
} | HF_VIT
HF_DINOV2_GATED: Names = {
    "encoder.layer.*.mlp.weights_in.*": "blocks.*.mlp.fc1.*",
    "encoder.layer.*.mlp.weights_out.*": "blocks.*.mlp.fc2.*",
} | HF_DINOV2
HF_DINOV3: Names = {
    **_HF_EMBEDDINGS,
    "embeddings.patch_embeddings.*": "patch_embed.proj.*",
    "layer.*.norm1.*": "blocks.*.norm1.*",
    "layer.*.norm2.*": "blocks.*.norm2.*",
    "layer.*.attention.q_proj.*": "blocks.*.attn.q.*",
    "layer.*.attention.k_proj.*": "blocks.*.attn.k.*",
    "layer.*.attention.v_proj.*": "blocks.*.attn.v.*",
    "layer.*.attention.o_proj.*": "blocks.*.attn.proj.*",
    "layer.*.layer_scale1.lambda1": "blocks.*.ls1.gamma",
    "layer.*.layer_scale2.lambda1": "blocks.*.ls2.gamma",
    "layer.*.mlp.gate_proj.*": "blocks.*.mlp.gate.*",
    "layer.*.mlp.up_proj.*": "blocks.*.mlp.value.*",
    "layer.*.mlp.down_proj.*": "blocks.*.mlp.fc2.*",
}
"""transformers' DINOv3ViTModel; without a gate, up_proj is all of fc1."""
_ALL: Names = _OURS | _OTHERS | TIMM_EVA | HF_DINOV2_GATED | HF_DINOV3  # no name is ambiguous

_CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")  # of DINOv2: the second number is the block's
_PARTS = {"qkv": ("q", "k", "v"), "fc1": ("gate", "value")}
_PART = re.compile(r"(blocks\.\d+\.(?:attn|mlp)\.)(q|k|v|gate|value)(\.(?:weight|bias))")


def ours(name: str) -> str:
    """Return our name of a tensor of any code; it may be a part, see ``joined``."""
    name = _CHUNK.sub(r"blocks.\1.", name)
    return next(_renamings(name, _ALL.items()), name)


def timm_name(name: str) -> str:
    """Return timm's name of a tensor of our encoder."""
    return next(_renamings(name, _OURS.items()), name)


def theirs(name: str, names: Names, known: Collection[str] = ()) -> str:
    """Return another code's name of one of our tensors.

    ``known`` are names that exist there, if the table has several for one of ours.
    """
    names_there = [*_renamings(name, ((own, its) for its, own in names.items())), name]
    return next((each for each in names_there if each in known), names_there[0])


def _renamings(name: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for old, new in pairs:
        pattern = re.escape(old).replace(r"\*", "([^.]+)")
        if match := re.fullmatch(pattern, name):  # re has a cache
            for part in match.groups():
                new = new.replace("*", part, 1)
            yield new


def whole(name: str) -> str:
    """Return the name of our tensor that a tensor is (a part of)."""
    match = _PART.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{'qkv' if match[2] in _PARTS['qkv'] else 'fc1'}{match[3]}"


def joined(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return tensors, by our names, with their parts joined; a missing key bias becomes 0."""
    result: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if _PART.fullmatch(name) is None:
            result[name] = tensor
        else:
            groups.setdefault(whole(name), {})[name.split(".")[3]] = tensor
    for name, parts in groups.items():
        result[name] = _whole(name, parts, source)
    return result


def _whole(name: str, parts: dict[str, Tensor], source: str) -> Tensor:
    if [*parts] == ["value"]:  # no gate
        return parts["value"]
    wanted = _PARTS["fc1" if ".fc1." in name else "qkv"]
    if "k" in wanted and name.endswith("bias") and "q" in parts:
        parts.setdefault("k", torch.zeros_like(parts["q"]))
    missing = next((part for part in wanted if part not in parts), None)
    if missing:
        raise UserError(f"{source} lacks the tensor '{name}': its part '{missing}' is missing")
    return torch.cat([parts[part] for part in wanted])


def apart(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split queries, keys and values, or a gated first layer, into parts by our names."""
    stem, whole, kind = name.rsplit(".", 2)
    parts = tensor.chunk(len(_PARTS[whole]))
    return {
        f"{stem}.{part}.{kind}": each.contiguous()
        for part, each in zip(_PARTS[whole], parts, strict=True)
    }


def interleaved(tensors: Mapping[str, Tensor], heads: int, *, back: bool) -> dict[str, Tensor]:
    """Convert the channel layout of a rotary encoder's queries and keys; ``back``: to ours.

    Ours rotates channel i of a head together with channel i + D/2. RoPE-ViT and EVA-02 rotate
    channels 2i and 2i + 1. Permuting the rows of ``qkv`` makes them equal.
    """
    return {
        key: _permuted(key, tensor, heads, back=back) if ".attn.qkv." in key else tensor
        for key, tensor in tensors.items()
    }


def _permuted(key: str, tensor: Tensor, heads: int, *, back: bool) -> Tensor:
    query, key_part, value = tensor.chunk(3)
    pair = ((-1, 2), (1, 2)) if back else ((2, -1), (1, 2))
    turned = [
        part.unflatten(0, (heads, -1)).unflatten(1, pair[0]).transpose(*pair[1]).flatten(0, 2)
        for part in (query, key_part)
    ]
    return torch.cat([*turned, value])
