"""Starts an encoder from the weights of another training.

Every tensor of the encoder comes from the file, or is fresh and named in the message; none stays
random silently. Only positions may be fresh, if the file has none of their kind.

Two things are resampled, which the message reports. Positions of another grid are resampled as the
code that trained them does (``resample_positions``; relative ones by timm's
``resize_rel_pos_bias_table``). Patch kernels of another size are resampled so that equally resized
patches have equal embeddings (FlexiViT's pseudo-inverse, timm's ``resample_patch_embed``).
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from timm.layers import resample_patch_embed, resize_rel_pos_bias_table
from torch import Tensor

from pospre.arguments import typed
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.teacher import follow
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.foreign import (
    as_text,
    is_interleaved,
    is_rounded,
    same_turn,
    turns,
    with_prefix_rows,
)
from pospre.nn.positions.sincos import is_sincos
from pospre.nn.positions.table import Table, resample_positions
from pospre.nn.swin.encoder import SwinEncoder
from pospre.nn.vit import Encoder
from pospre.nn.weight_layouts import shortened
from pospre.nn.weight_names import interleaved
from pospre.training.build import Weights, load_model
from pospre.training.weight_files import Keys, Source, is_weights_file, read_source

KEYS = Keys("encoder.weights = ", "encoder.weights_from")
_TABLE = "relative_position_bias_table"
_SHARED = f"shared_rel_pos.{_TABLE}"
_KERNEL = "patch_embed.proj.weight"
_COMPARE = (
    "compare name, depth, class_token, num_registers, layer_scale and final_norm of the encoder"
)


@dataclass
class Loaded:
    """The result of loading an encoder's weights."""

    source: Source  # where they come from
    expected: int  # number of the encoder's tensors
    tensors: dict[str, Tensor] = field(default_factory=dict)  # taken, by timm's names
    # names of tensors that keep their initial values
    fresh: list[str] = field(default_factory=list)
    # names in the source that the encoder does not use
    unused: list[str] = field(default_factory=list)
    resampled: list[str] = field(default_factory=list)  # descriptions of what was resampled
    # description of another position scheme in the source, if any
    positions: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = f"{len(self.tensors)} of {self.expected} tensors"
        parts = [f"encoder: {count} from {self.source.name}"]
        for title, keys in (
            ("fresh", self.fresh),
            ("not used", self.unused),
            ("left out", self.source.left_out),
            ("resampled", self.resampled),
            ("positions", self.positions),
        ):
            if keys:
                parts.append(f"{title}: {shortened(keys)}")
        return "; ".join(parts)


@typed
def load_run(address: str | Path, weights: Weights = "student") -> PretrainModel:
    """Return a run's trained model with its algorithms attached, in eval mode on the CPU.

    Args:
        address: a run folder or a folder of checkpoints (the newest intact one counts), or a
            checkpoint; local or ``s3://``.
        weights: ``teacher`` loads the teacher's weights instead of the trained ones.

    Raises:
        UserError: there is none, it is damaged, or has no teacher; or it is a file of weights.
    """
    if is_weights_file(str(address)):
        raise UserError(
            f"load_run takes a run folder or a checkpoint, but {address} is a weight file: "
            "load it into an existing model with pospre.load_weights(model, file)."
        )
    return load_model(str(address), weights=weights)[0]


@typed
def load_weights(model: PretrainModel, uri: str | Path, which: Weights = "student") -> str:
    """Load an encoder's weights into ``model`` and into the teachers that follow it.

    Args:
        model: with its algorithms attached.
        uri: checkpoint, folder of them or run folder; or a file of weights (``.safetensors``,
            ``.pth``, ``.pth.tar``, ``.pt``, ``.bin``) of ours or of a layout that
            ``pospre.nn.weight_layouts`` lists; local or S3. ``FILE,positions=SCHEME`` names the
            positions of a file whose tensors do not show them: rotary ones are no tensors, and a
            file may have none (``positions=none``).
        which: the encoder of a checkpoint, or of a file that also holds a teacher.

    Returns:
        One line that says what was loaded, what is fresh, resampled, not used and left out.

    Raises:
        UserError: the file cannot be read, or does not fit; the first such tensor is named.
    """
    source = read_source(str(uri), which, KEYS)
    if model.encoder.positions.name == "sincos":
        _check_fixed(model.encoder, source)
    return str(take_weights(model, source))


def take_weights(model: PretrainModel, source: Source) -> Loaded:
    """Load the tensors of ``source``; see ``load_weights``."""
    encoder = model.encoder
    _check_kind(encoder, source)
    _check_key_bias(encoder, source)
    source = _in_our_layout(encoder, source)
    rounded = is_rounded(source.positions) and not is_rounded(encoder.positions.as_given())
    names = {encoder.timm_name_of(key): key for key in encoder.state_dict()}
    expected = {key: encoder.state_dict()[own] for key, own in names.items()}
    done = Loaded(source, len(expected), positions=_other_scheme(encoder, source))
    if rounded:
        done.resampled.append("rotary periods, bfloat16 in the file, exact here")
    for key, own in expected.items():
        found = _matching(key, own, encoder, done)
        if found is None:
            done.fresh.append(key)
        else:
            done.tensors[key] = found.to(own.dtype)
    copied = any(key.endswith(f"rel_pos.{_TABLE}") for key in expected)
    used = {*expected, _SHARED} if copied else {*expected}
    done.unused = [key for key in source.tensors if key not in used]
    _check_unused(done.unused, source)
    taken = {names[key]: tensor for key, tensor in done.tensors.items()}
    encoder.load_state_dict(taken, strict=False)
    follow(model.teachers.pairs, 0.0)
    return done


def _check_kind(encoder: PatchEncoder, source: Source) -> None:
    tables = any(key.endswith(f"attn.{_TABLE}") for key in source.tensors)
    if tables and isinstance(encoder, SwinEncoder):
        raise UserError(
            f"{source.named} holds Swin's attention bias as tables of one window; "
            "the network that gives it for any window is in the run: use its folder or a "
            "checkpoint."
        )


def _check_key_bias(encoder: PatchEncoder, source: Source) -> None:
    if not isinstance(encoder, Encoder) or encoder.size.key_bias:
        return
    for key, tensor in source.tensors.items():
        if key.endswith("attn.qkv.bias") and tensor.chunk(3)[1].any():
            raise UserError(
                f"{source.named} has a bias of keys in '{key}', and {encoder.options.name} has "
                "none. Use an encoder with one, such as vitb16; or, if DINOv3's code masks it, "
                "keep the file's 'bias_mask'."
            )


def _in_our_layout(encoder: PatchEncoder, source: Source) -> Source:
    """Return the tensors in the layout of our rotary positions; others stay as they are."""
    own = encoder.positions
    if (
        source.positions is None
        and is_interleaved(own.as_given())
        and "pos_embed" in source.tensors
    ):
        raise UserError(
            f"{source.named} has a table of positions, but does not say whether its encoder "
            f"also rotates queries and keys. State it: '{source.name},positions="
            f"{as_text(own.as_given())}', or {source.name},positions=learned"
        )
    if source.positions is None or not turns(source.positions):
        return source
    if not same_turn(own, source.positions):
        raise UserError(
            f"{source.named} was trained with positions {as_text(source.positions)}, and the "
            f"encoder has {as_text(own.as_given())}; use encoder.positions = "
            f"{as_text(source.positions)}"
        )
    if source.is_run or not is_interleaved(source.positions):
        return source
    tensors = interleaved(source.tensors, own.space.num_heads, back=True)
    return replace(source, tensors=tensors)


def _other_scheme(encoder: Encoder, source: Source) -> list[str]:
    """Describe a change of schemes, which no tensor may show: distance biases have none."""
    theirs, own = source.positions, encoder.positions
    if theirs is None or turns(theirs):
        return []
    ((name, options),) = ({theirs: {}} if isinstance(theirs, str) else theirs).items()
    if (name, {**options}) == (own.name, {**own.options}):
        return []
    return [f"{as_text(theirs)} → {as_text(own.as_given())}"]


def _check_fixed(encoder: Encoder, source: Source) -> None:
    """Raise ``UserError`` if a learned table would be loaded as the fixed one, and frozen.

    A run records which it is; a file is judged by its values.
    """
    told = source.positions or ""
    learned = bool({"learned", "learned_sincos"} & {*([told] if isinstance(told, str) else told)})
    table = source.tensors.get("pos_embed")
    if source.positions is None and table is not None:
        patches = _with_prefix(table, encoder)[0, encoder.num_prefix_tokens :]
        side = math.isqrt(len(patches))
        grid = encoder.grid if len(patches) == encoder.num_patches else (side, side)
        learned = math.prod(grid) == len(patches) and not is_sincos(patches, *grid)
    if learned:
        raise UserError(
            f"encoder.positions = sincos is a fixed table, but {source.name} has learned its own; "
            "use encoder.positions=learned"
        )


def _matching(key: str, own: Tensor, encoder: Encoder, done: Loaded) -> Tensor | None:
    """Return the source's tensor for ``key``; None if it may be fresh."""
    source = done.source
    found = source.tensors.get(key)
    is_table = key.endswith(f"rel_pos.{_TABLE}")
    if found is None and is_table:
        found = source.tensors.get(_SHARED)  # SimMIM's fine-tuning: a copy for every block
        if found is None:
            return None
    if found is None and key == "pos_embed":
        return None
    if found is None:
        raise UserError(f"{source.named} lacks the tensor '{key}'; {_COMPARE}")
    old = tuple(found.shape)
    if key == "rope.freqs" and found.numel() == own.numel():
        found = found.view_as(own)  # RoPE-ViT's own has heads and their channels in one
    if key == "pos_embed" and found.shape != own.shape:
        found = _with_prefix(found, encoder)
    if found.shape == own.shape:
        return found
    if key == "pos_embed":
        found = _resampled(found, own, encoder, source)
    elif key == _KERNEL and found.shape[:2] == own.shape[:2]:
        found = resample_patch_embed(found.float(), list(own.shape[2:]))
    elif is_table and found.shape[1] == own.shape[1]:
        found = resize_rel_pos_bias_table(found, encoder.grid, tuple(own.shape))
    if found.shape != own.shape:
        raise UserError(
            f"{source.named}: tensor '{key}' has shape {old}, the encoder wants "
            f"{tuple(own.shape)}; {_COMPARE}"
        )
    done.resampled.append(f"{key} {_shape(old)} → {_shape(own.shape)}")
    return found


def _with_prefix(table: Tensor, encoder: Encoder) -> Tensor:
    """Return a file's table with a row for every prefix token of the encoder."""
    registers = encoder.num_prefix_tokens - encoder.has_class_token
    bare = registers > 0 or table.shape[1] == encoder.num_patches
    return with_prefix_rows(table, encoder.has_class_token, registers, bare=bare)


def _resampled(found: Tensor, own: Tensor, encoder: Encoder, source: Source) -> Tensor:
    """Return the position table of another grid, resampled to the grid of the encoder."""
    prefix = encoder.num_prefix_tokens
    count = found.shape[1] - prefix
    side = round(max(count, 0) ** 0.5)
    if found.shape[-1] != own.shape[-1] or side * side != count:
        raise UserError(
            f"{source.named}: tensor 'pos_embed' has shape {tuple(found.shape)}, "
            f"the encoder wants {tuple(own.shape)}; only square grids are resampled"
        )
    table = encoder.positions
    assert isinstance(table, Table)
    how = source.resampling or table.resampling
    patches = resample_positions(found[0, prefix:], (side, side), table.grid, how)
    return torch.cat([found[0, :prefix], patches])[None]


def _check_unused(unused: list[str], source: Source) -> None:
    """Raise a ``UserError`` if the file has a part of an encoder that this one lacks."""
    allowed = ("pos_embed", "norm.", "fc_norm.", "head.")
    for key in unused:
        if not key.startswith(allowed) and not key.endswith(f"rel_pos.{_TABLE}"):
            raise UserError(f"{source.named}: its tensor '{key}' is not in the encoder; {_COMPARE}")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
