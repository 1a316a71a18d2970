"""An encoder as a folder that ``transformers.AutoModel.from_pretrained`` loads, every tensor.

Which of its networks is the same depends on the encoder: ``ViTModel`` has a class token,
``IJepaModel`` none, ``Dinov2Model`` layer scale, ``Dinov2WithRegistersModel`` registers, and
``DINOv3ViTModel`` rotary positions.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pospre.errors import UserError, needing
from pospre.evaluation.features import WHOLE
from pospre.exporting import hf_dinov3
from pospre.exporting.timm_encoder import Parts
from pospre.nn.patch_encoder import PatchEncoder
from pospre.nn.positions.published import turns
from pospre.nn.vit import Encoder

LIBRARY = "transformers"
TOLERANCE = 1e-5
_EXTRA = "hf"
_OTHERS = "the formats timm, safetensors, onnx and torchhub take it"

# timm's names, with query, key and value apart, and theirs
_EMBEDDING = {
    r"cls_token": "embeddings.cls_token",
    r"pos_embed": "embeddings.position_embeddings",
    r"reg_token": "embeddings.register_tokens",
    r"patch_embed\.proj\.(\w+)": r"embeddings.patch_embeddings.projection.\1",
    r"norm\.(\w+)": r"layernorm.\1",
    r"blocks\.(\d+)\.attn\.proj\.(\w+)": r"encoder.layer.\1.attention.output.dense.\2",
    r"blocks\.(\d+)\.attn\.([qkv][a-z]+)\.(\w+)": r"encoder.layer.\1.attention.attention.\2.\3",
}
_VIT = _EMBEDDING | {
    r"blocks\.(\d+)\.norm1\.(\w+)": r"encoder.layer.\1.layernorm_before.\2",
    r"blocks\.(\d+)\.norm2\.(\w+)": r"encoder.layer.\1.layernorm_after.\2",
    r"blocks\.(\d+)\.mlp\.fc1\.(\w+)": r"encoder.layer.\1.intermediate.dense.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(\w+)": r"encoder.layer.\1.output.dense.\2",
}
_DINOV2 = _EMBEDDING | {
    r"blocks\.(\d+)\.(norm\d|mlp\.fc\d)\.(\w+)": r"encoder.layer.\1.\2.\3",
    r"blocks\.(\d+)\.ls(\d)\.gamma": r"encoder.layer.\1.layer_scale\2.lambda1",
}
_GATED = {
    r"blocks\.(\d+)\.mlp\.fc1\.(\w+)": r"encoder.layer.\1.mlp.weights_in.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(\w+)": r"encoder.layer.\1.mlp.weights_out.\2",
} | _DINOV2


def write(parts: Parts, path: Path) -> None:
    """Write configuration, weights and image processor into a new folder.

    Raises:
        UserError: no network of theirs is the same, or the extra ``hf`` is not installed.
    """
    kind = _network(parts)
    with needing(_EXTRA, "--format hf"):
        import transformers
    is_rotary = kind == hf_dinov3.KIND
    options = hf_dinov3.config(parts) if is_rotary else _config(parts, kind)
    config = getattr(transformers, kind.replace("Model", "Config"))(**options)
    network = getattr(transformers, kind)(config)
    network.load_state_dict(hf_dinov3.tensors(parts) if is_rotary else _tensors(parts, kind))
    network.save_pretrained(path)
    if parts.model.encoder.channels == 3:
        transformers.BitImageProcessor(**_processor(parts)).save_pretrained(path)


def compute(parts: Parts, path: Path, images: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return what loads the folder, in words, and its outputs."""
    with needing(_EXTRA, "--format hf"):
        import transformers
    network, found = transformers.AutoModel.from_pretrained(path, output_loading_info=True)
    wrong = {key: names for key, names in found.items() if names}
    if wrong:
        raise RuntimeError(f"transformers {transformers.__version__} does not take all: {wrong}")
    with torch.no_grad():
        tokens = network.eval()(pixel_values=images).last_hidden_state
    text = (
        f"transformers {transformers.__version__} loads all {len(network.state_dict())} tensors "
        f"of the {type(network).__name__}"
    )
    return text, {"tokens": tokens}


def usage(parts: Parts, out: Path) -> list[str]:
    """Return the lines of Python that load the folder."""
    lines = [
        "from transformers import AutoImageProcessor, AutoModel",
        f"model = AutoModel.from_pretrained({str(out)!r})",
        f"processor = AutoImageProcessor.from_pretrained({str(out)!r})",
        'tokens = model(**processor(image, return_tensors="pt")).last_hidden_state',
    ]
    if parts.model.encoder.channels != 3:  # nothing resizes such images
        lines = ["from transformers import AutoModel", lines[1]]
    return lines


def _network(parts: Parts) -> str:
    """Return the name of the network that computes the same.

    Raises:
        UserError: there is none; the message names the formats that hold the encoder.
    """
    encoder = parts.model.encoder
    if hf_dinov3.fits(encoder):
        return hf_dinov3.KIND
    kind = "ViTModel" if encoder.has_class_token else "IJepaModel"
    if "blocks.0.ls1.gamma" in parts.tensors or _is_gated(encoder):
        kind = "Dinov2Model"
    if "reg_token" in parts.tensors:
        kind = "Dinov2WithRegistersModel"
    lacking = _lacking(encoder, parts, kind)
    if lacking:
        raise UserError(f"--format hf: no network of transformers has {lacking}; {_OTHERS}.")
    return kind


def _lacking(encoder: PatchEncoder, parts: Parts, kind: str) -> str:
    """Return what of the encoder ``kind`` has not, in words; empty where it has all."""
    if not isinstance(encoder, Encoder):
        return f"this encoder ({parts.timm_name})"
    if "pos_embed" not in parts.tensors or turns(encoder.positions.as_given()):
        return f"encoder.positions = {encoder.positions.name}"
    if isinstance(encoder.norm, nn.Identity):
        return "encoder.final_norm = false"
    if "act_layer" in parts.kwargs:
        return f"the activation {parts.kwargs['act_layer']}"
    names = _names(encoder, kind)
    for key in parts.tensors:
        if not any(re.fullmatch(pattern, key) for pattern in names):
            return f"a tensor '{key}'"
    if kind.startswith("Dinov2") and not encoder.has_class_token:
        return "layer scale, registers or SwiGLU without a class token"
    if kind.startswith("Dinov2") and len({*parts.image_size}) + len({*encoder.patch_size}) > 2:
        return "layer scale, registers or SwiGLU on images that are not square"
    return ""


def _config(parts: Parts, kind: str) -> dict[str, Any]:
    """Return the arguments of the network's configuration."""
    encoder = parts.model.encoder
    block: Any = encoder.blocks[0]
    hidden = block.mlp.fc1.out_features
    config = {
        "hidden_size": encoder.embed_dim,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": block.attn.num_heads,
        "layer_norm_eps": block.norm1.eps,
        "qkv_bias": block.attn.qkv.bias is not None,
        "image_size": _side(parts.image_size),
        "patch_size": _side(encoder.patch_size),
        "num_channels": encoder.channels,
    }
    if kind.startswith("Dinov2"):
        gated = _is_gated(encoder)  # each half of their first layer has two thirds of the ratio
        config["mlp_ratio"] = hidden * (0.75 if gated else 1) / encoder.embed_dim
        config["use_swiglu_ffn"] = gated
        if kind == "Dinov2Model":
            config["use_mask_token"] = False
        else:
            config["num_register_tokens"] = encoder.num_prefix_tokens - 1
        return config
    # what it calls the pooled output is then the class token itself, and nothing of it is random
    return {**config, "intermediate_size": hidden, "pooler_act": "linear"}


def _tensors(parts: Parts, kind: str) -> dict[str, Tensor]:
    """Return the encoder's tensors under their names."""
    encoder, own = parts.model.encoder, dict(parts.tensors)
    prefix = int(encoder.has_class_token)
    registers = slice(prefix, encoder.num_prefix_tokens)
    table = own["pos_embed"]
    own["pos_embed"] = torch.cat([table[:, :prefix], table[:, encoder.num_prefix_tokens :]], dim=1)
    for key in [key for key in own if ".attn.qkv." in key]:
        for name, part in zip(("query", "key", "value"), own.pop(key).chunk(3), strict=True):
            own[key.replace("qkv", name)] = part.contiguous()
    dim = encoder.embed_dim
    added: dict[str, Tensor] = {}
    if kind == "ViTModel":
        added = {"pooler.dense.weight": torch.eye(dim), "pooler.dense.bias": torch.zeros(dim)}
    elif kind == "Dinov2WithRegistersModel":
        own["reg_token"] = own["reg_token"] + table[:, registers]  # theirs have no positions
        added = {"embeddings.mask_token": torch.zeros(1, dim)}  # for masks, which nobody gives
    if kind.startswith("Dinov2") and "blocks.0.ls1.gamma" not in own:
        own |= {
            f"blocks.{i}.ls{j}.gamma": torch.ones(dim) for i in range(encoder.depth) for j in (1, 2)
        }
    names = _names(encoder, kind)
    return {_renamed(key, names): value for key, value in own.items()} | added


def _names(encoder: PatchEncoder, kind: str) -> dict[str, str]:
    """Return the patterns of timm's names and theirs for a network."""
    return _GATED if _is_gated(encoder) else _DINOV2 if kind.startswith("Dinov2") else _VIT


def _is_gated(encoder: PatchEncoder) -> bool:
    """Return whether the MLPs are SwiGLU."""
    block: Any = encoder.blocks[0] if isinstance(encoder, Encoder) else None
    return block is not None and block.mlp.gated


def _renamed(key: str, names: dict[str, str]) -> str:
    """Return their name of a tensor by the first of ``names`` that matches ours."""
    matches = ((re.fullmatch(pattern, key), name) for pattern, name in names.items())
    return next(found.expand(name) for found, name in matches if found)


def _processor(parts: Parts) -> dict[str, Any]:
    """Return the arguments of the image processor: our evaluations' centre view."""
    height, width = parts.image_size
    square, small = height == width, max(height, width) <= WHOLE
    short = height if small else round(height * 256 / 224)
    return {
        "size": {"shortest_edge": short} if square else {"height": height, "width": width},
        "crop_size": {"height": height, "width": width},
        "do_center_crop": square,
        "resample": 3,  # bicubic
        "image_mean": parts.mean,
        "image_std": parts.std,
    }


def _side(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else [*size]
