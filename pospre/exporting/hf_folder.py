"""An encoder as a folder that ``transformers.AutoModel.from_pretrained`` loads, every tensor.

The encoder decides which of its networks is the same. ``ViTModel`` has a class token and
``IJepaModel`` none. ``Dinov2Model`` has layer scale, ``Dinov2WithRegistersModel`` registers and
``DINOv3ViTModel`` rotary positions.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pospre.errors import UserError, needing
from pospre.evaluation.features import WHOLE
from pospre.exporting.timm_encoder import Parts
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.foreign import has_table, rotation_of, without_rows
from pospre.nn.vit import Encoder
from pospre.nn.weights.names import HF_DINOV2, HF_DINOV2_GATED, HF_DINOV3, HF_VIT, apart, theirs

LIBRARY = "transformers"
TOLERANCE = 1e-5
_EXTRA = "hf"
_DINOV3 = "DINOv3ViTModel"
_DRAWN = ("shift", "jitter", "rescale")  # of rotary positions, in training


def write(parts: Parts, path: Path) -> None:
    """Write configuration, weights and image processor into a new folder."""
    kind = _network(parts)
    with needing(_EXTRA, "--format hf"):
        import transformers
    is_rotary = kind == _DINOV3
    options = _dinov3_config(parts) if is_rotary else _config(parts, kind)
    config = getattr(transformers, kind.replace("Model", "Config"))(**options)
    config.architectures = [kind]
    config.save_pretrained(path)
    # under the names of the published files, which transformers 4 and 5 both read
    tensors = _dinov3_tensors(parts) if is_rotary else _tensors(parts, kind)
    save_file(tensors, path / "model.safetensors", {"format": "pt", **parts.metadata()})
    if parts.model.encoder.channels == 3:
        transformers.BitImageProcessor(**_processor(parts)).save_pretrained(path)


def compute(parts: Parts, path: Path, images: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return a sentence about what loads the folder, and its outputs."""
    with needing(_EXTRA, "--format hf"):
        import transformers
    network, info = transformers.AutoModel.from_pretrained(path, output_loading_info=True)
    wrong = {key: names for key, names in info.items() if names}
    if wrong:
        raise RuntimeError(
            f"transformers {transformers.__version__} does not load all tensors: {wrong}"
        )
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
    """Return the name of the network that computes the same; raise ``UserError`` if none does."""
    encoder = parts.model.encoder
    if _fits_dinov3(encoder):
        return _DINOV3
    kind = "ViTModel" if encoder.has_class_token else "IJepaModel"
    is_gated = isinstance(encoder, Encoder) and encoder.size.swiglu
    if "blocks.0.ls1.gamma" in parts.tensors or is_gated:
        kind = "Dinov2Model"
    if "reg_token" in parts.tensors:
        kind = "Dinov2WithRegistersModel"
    lacking = _lacking(encoder, parts, kind)
    if lacking:
        raise UserError(
            f"--format hf: no model of transformers has {lacking}; use the format timm, "
            "safetensors or onnx."
        )
    return kind


def _lacking(encoder: PatchEncoder, parts: Parts, kind: str) -> str:
    """Return the part of the encoder that ``kind`` lacks, in words; empty if it has all."""
    if not isinstance(encoder, Encoder):
        return f"this encoder ({parts.timm_name})"
    if encoder.positions.timm != "vit":
        return f"encoder.positions = {encoder.positions.name}"
    if isinstance(encoder.norm, nn.Identity):
        return "encoder.final_norm = false"
    if "act_layer" in parts.kwargs:
        return f"the activation {parts.kwargs['act_layer']}"
    names = HF_DINOV2 if kind.startswith("Dinov2") else HF_VIT
    for key in parts.tensors:
        if ".attn.qkv." not in key and theirs(key, names) == key:
            return f"a tensor '{key}'"
    if kind.startswith("Dinov2") and not encoder.has_class_token:
        return "layer scale, registers or SwiGLU without a class token"
    if kind.startswith("Dinov2") and len({*parts.image_size}) + len({*encoder.patch_size}) > 2:
        return "layer scale, registers or SwiGLU on images that are not square"
    return ""


def _config(parts: Parts, kind: str) -> dict[str, Any]:
    """Return the arguments of the network's configuration."""
    encoder = parts.model.vit
    size = encoder.size
    config = {
        "hidden_size": encoder.embed_dim,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": size.num_heads,
        "layer_norm_eps": size.eps,
        "qkv_bias": size.qkv_bias,
        "image_size": _side(parts.image_size),
        "patch_size": _side(encoder.patch_size),
        "num_channels": encoder.channels,
    }
    if kind.startswith("Dinov2"):
        # each half of their gated first layer has two thirds of the ratio
        ratio = size.hidden_dim * (0.75 if size.swiglu else 1) / encoder.embed_dim
        # transformers 5 takes whole numbers only
        config["mlp_ratio"] = int(ratio) if ratio.is_integer() else ratio
        config["use_swiglu_ffn"] = size.swiglu
        if kind == "Dinov2Model":
            config["use_mask_token"] = False
        else:
            config["num_register_tokens"] = encoder.num_prefix_tokens - 1
        return config
    # the pooled output is then the class token itself, without random weights
    return {**config, "intermediate_size": size.hidden_dim, "pooler_act": "linear"}


def _tensors(parts: Parts, kind: str) -> dict[str, Tensor]:
    """Return the encoder's tensors under the network's names."""
    encoder = parts.model.encoder
    prefix = int(encoder.has_class_token)
    own = without_rows(parts.tensors, prefix, encoder.num_prefix_tokens)
    for key in [key for key in own if ".attn.qkv." in key]:
        own |= apart(key, own.pop(key))
    dim = encoder.embed_dim
    added: dict[str, Tensor] = {}
    if kind == "ViTModel":
        added = {"pooler.dense.weight": torch.eye(dim), "pooler.dense.bias": torch.zeros(dim)}
    elif kind == "Dinov2WithRegistersModel":
        added = {"embeddings.mask_token": torch.zeros(1, dim)}  # for masks: none are given
    if kind.startswith("Dinov2") and "blocks.0.ls1.gamma" not in own:
        own |= {
            f"blocks.{i}.ls{j}.gamma": torch.ones(dim) for i in range(encoder.depth) for j in (1, 2)
        }
    names = HF_DINOV2 if kind.startswith("Dinov2") else HF_VIT
    if isinstance(encoder, Encoder) and encoder.size.swiglu:
        names = HF_DINOV2_GATED
    return {theirs(key, names): value for key, value in own.items()} | added


def _fits_dinov3(encoder: PatchEncoder) -> bool:
    """Return whether ``DINOv3ViTModel`` computes the same as an encoder."""
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


def _dinov3_config(parts: Parts) -> dict[str, Any]:
    """Return the arguments of ``DINOv3ViTConfig``."""
    encoder = parts.model.vit
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


def _dinov3_tensors(parts: Parts) -> dict[str, Tensor]:
    """Return the encoder's tensors under DINOv3's names; what is not scaled is scaled by 1."""
    encoder = parts.model.vit
    dim, own = encoder.embed_dim, encoder.state_dict()
    for block in range(encoder.depth):
        for branch in (1, 2):
            own.setdefault(f"blocks.{block}.ls{branch}.gamma", torch.ones(dim))
    tensors = {"embeddings.mask_token": torch.zeros(1, 1, dim)}  # for masks: none are given
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
                tensors[theirs(each, HF_DINOV3)] = piece
    return tensors


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
