"""Starts an encoder from the weights of another training.

Every tensor of the encoder comes from the file, or is fresh and named in the message; none stays
random silently. Only positions may be fresh, if the file has none of their kind.

Three things may differ from the file, each with a line that says so: the size of patches, more
channels or one (``nn.weights.kernels``), and more registers, which are fresh and gated. Positions
of another grid are resampled as the code that trained them does (``resample_positions``; relative
ones by timm's ``resize_rel_pos_bias_table``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pospre.arguments import typed
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.teacher import follow
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.encoder_options import Kernel
from pospre.nn.lora import PAIRS
from pospre.nn.positions.fading import Fading, only_old
from pospre.nn.positions.foreign import constant_frequencies, is_rounded
from pospre.nn.swin.encoder import SwinEncoder
from pospre.nn.vit import Encoder
from pospre.nn.weights.layouts import shortened
from pospre.nn.weights.names import SHARED, TABLE
from pospre.training.start_encoder import KEYS, check_fits, factors_of_one, fitting_section
from pospre.training.start_positions import (
    check_fading,
    check_fixed,
    check_thrown_away,
    fitted_relative,
    fitted_table,
    in_our_layout,
    other_scheme,
)
from pospre.training.start_shapes import (
    KERNEL,
    about_registers,
    added_registers,
    fitted_kernel,
    take_pixels,
)
from pospre.training.weight_files import Source, read_source
from pospre.training.weight_records import Weights

_COMPARE = (
    "compare name, depth, num_heads, class_token, num_registers, layer_scale and final_norm of "
    "the encoder"
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
    # lines about options that differ from the file's
    differences: list[str] = field(default_factory=list)
    # description of another position scheme in the source, if any
    positions: list[str] = field(default_factory=list)
    # what nothing shows, and is taken for granted
    assumed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = f"{len(self.tensors)} of {self.expected} tensors"
        parts = [f"encoder: {count} from {self.source.name}"]
        for title, keys in (
            ("fresh", self.fresh),
            ("not used", self.unused),
            ("left out", self.source.left_out),
            ("resampled", self.resampled),
            ("positions", self.positions),
            ("assumed", self.assumed),
        ):
            if keys:
                parts.append(f"{title}: {shortened(keys)}")
        return "; ".join(parts)


@typed
def load_weights(
    model: PretrainModel,
    uri: str | Path,
    which: Weights = "student",
    *,
    kernel: Kernel = "bicubic",
) -> str:
    """Load an encoder's weights into ``model`` and into the teachers that follow it.

    Args:
        model: with its algorithms attached.
        uri: checkpoint, folder of them or run folder; or a file of weights (``.safetensors``,
            ``.pth``, ``.pth.tar``, ``.pt``, ``.bin``) of ours or of a layout that
            ``pospre.nn.weights.layouts`` lists; local or S3. ``FILE,positions=SCHEME`` names the
            positions of a file whose tensors do not show them: rotary ones are no tensors, and a
            file may have none (``positions=none``). ``positions=drop`` leaves them out,
            ``FILE,grid=7x28`` and ``FILE,heads=12`` say what else no tensor shows.
        which: the encoder of a checkpoint, or of a file that also holds a teacher.
        kernel: how the patch kernel gets another size, see ``pospre.nn.weights.kernels``.

    Returns:
        One line that says what was loaded, what is fresh, resampled, not used and left out, and
        how images are normalised from now on: as the weights expect, if that is known and the
        model was made without ``mean`` and ``std``. Then a line for each option of the encoder that
        differs from the weights.

    Raises:
        UserError: the file cannot be read, or does not fit; the first such tensor is named.
    """
    return load(model, str(uri), which, kernel, take_weights)[0]


def load(
    model: PretrainModel,
    uri: str,
    which: Weights,
    kernel: Kernel,
    take: Callable[[PretrainModel, Source, Kernel], Loaded],
) -> tuple[str, list[str]]:
    """Load weights as ``take`` does; return what is said of it, and the names of fresh tensors."""
    source = read_source(uri, which, KEYS)
    check_fits(model.encoder.options, source, getattr(model.encoder, "size", None))
    try:
        done = take(model, source, kernel)
    except UserError as error:
        section = fitting_section(model.encoder.options, source)
        raise error.restated(f"{error}{section}") from error
    said = [f"{done}; images with {model.augment.described()}", *done.differences]
    return "\n".join(said), done.fresh


def take_weights(model: PretrainModel, source: Source, kernel: Kernel = "bicubic") -> Loaded:
    """Load the tensors of ``source``; see ``load_weights``."""
    encoder = model.encoder
    source, about = take_pixels(model, source)
    with only_old(encoder):
        done = take_encoder(encoder, source, kernel)
    done.differences += about
    if isinstance(encoder.positions, Fading):
        check_fading(encoder.positions)
        done.differences.append(
            f"encoder.positions = {encoder.positions.new.name}: {encoder.positions.name} over the "
            "first half of the training"
        )
        new = encoder.positions.new.named_parameters(prefix="positions.new")
        done.fresh += (encoder.timm_name_of(name) for name, _ in new)
    follow(model.teachers.pairs, 0.0)
    return done


def take_encoder(encoder: PatchEncoder, source: Source, kernel: Kernel) -> Loaded:
    """Load the tensors of ``source`` into an encoder alone."""
    if encoder.positions.name == "sincos":
        check_fixed(encoder, source)
    _check_kind(encoder, source)
    _check_heads(encoder, source)
    _check_activation(encoder, source)
    _check_key_bias(encoder, source)
    source = in_our_layout(encoder, source)
    theirs = source.known.positions
    rounded = is_rounded(theirs) and not is_rounded(encoder.positions.as_given())
    own_names = [key for key in encoder.state_dict() if PAIRS not in key]
    names = {encoder.timm_name_of(key): key for key in own_names}
    expected = {key: encoder.state_dict()[own] for key, own in names.items()}
    done = Loaded(source, len(expected), positions=other_scheme(encoder, source))
    if rounded:
        done.resampled.append("rotary periods, bfloat16 in the file, exact here")
    for key, own in expected.items():
        matching = _matching(key, own, encoder, done, kernel)
        if matching is None:
            done.fresh.append(key)
        else:
            done.tensors[key] = matching.to(own.dtype)
    copied = any(key.endswith(f"rel_pos.{TABLE}") for key in expected)
    used = {*expected, SHARED} if copied else {*expected}
    used |= factors_of_one(encoder.options, source) | _same_frequencies(encoder, source)
    done.unused = [key for key in source.tensors if key not in used]
    _check_unused(done.unused, encoder, source)
    taken = {names[key]: tensor for key, tensor in done.tensors.items()}
    encoder.load_state_dict(taken, strict=False)
    return done


def _check_kind(encoder: PatchEncoder, source: Source) -> None:
    tables = any(key.endswith(f"attn.{TABLE}") for key in source.tensors)
    if tables and isinstance(encoder, SwinEncoder):
        raise UserError(
            f"{source.named} holds Swin's attention bias as tables of one window; "
            "the network that gives it for any window is in the run: use its folder or a "
            "checkpoint."
        )


def _check_heads(encoder: PatchEncoder, source: Source) -> None:
    heads = source.known.heads
    if isinstance(encoder, Encoder) and heads not in (None, encoder.size.num_heads):
        raise UserError(
            f"{source.named} has {heads} attention heads, and the encoder "
            f"{encoder.size.num_heads}; use encoder.num_heads = {heads}"
        )


def _check_activation(encoder: PatchEncoder, source: Source) -> None:
    theirs = source.known.activation
    if theirs is None or not isinstance(encoder, Encoder) or encoder.size.swiglu:
        return
    if theirs != encoder.size.activation:
        raise UserError(
            f"{source.named}: its config.json says that MLPs have the activation {theirs}, and the "
            f"encoder has {encoder.size.activation}; use encoder.name = timm:NAME, or --model "
            "timm:NAME,FILE, of a model with it"
        )


def _same_frequencies(encoder: PatchEncoder, source: Source) -> set[str]:
    """Return the tensor of rotary frequencies if it is what the encoder computes by its options."""
    key, own = "rope.freqs", constant_frequencies(encoder.positions)
    if own is None or key not in source.tensors:
        return set()
    tensor = source.tensors[key].float()
    same = tensor.numel() == own.numel() and torch.allclose(tensor.view_as(own), own)
    return {key} if same else set()


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


def _matching(
    key: str, own: Tensor, encoder: PatchEncoder, done: Loaded, kernel: Kernel
) -> Tensor | None:
    """Return the source's tensor for ``key``; None if it may be fresh."""
    source = done.source
    theirs = source.tensors.get(key)
    is_table = key.endswith(f"rel_pos.{TABLE}")
    if theirs is None and is_table:
        theirs = source.tensors.get(SHARED)  # SimMIM's fine-tuning: a copy for every block
    added = added_registers(encoder, source)
    may_lack = is_table or key == "pos_embed" or (added and key in ("reg_token", "register_gate"))
    if key == "reg_token" and added:
        done.differences.append(about_registers(own, added, source.name))
        if theirs is not None:
            theirs = torch.cat([theirs, own[:, theirs.shape[1] :]], dim=1)
            done.fresh.append(key)
    if theirs is None and may_lack:
        return None
    if theirs is None:
        raise UserError(f"{source.named} lacks the tensor '{key}'; {_COMPARE}")
    old, changed = tuple(theirs.shape), ""
    if key == "rope.freqs" and theirs.numel() == own.numel():
        theirs = theirs.view_as(own)  # RoPE-ViT's own has heads and their channels in one
    elif key == "pos_embed" or is_table:
        is_added = key == "pos_embed"
        fitted = fitted_table if is_added else partial(fitted_relative, key, theirs)
        theirs, changed, assumed = fitted(own, encoder, source)
        if assumed and assumed not in done.assumed:
            done.assumed.append(assumed)
    elif key == KERNEL and theirs.ndim == 4 and len(theirs) == len(own):
        theirs, lines = fitted_kernel(theirs, own, kernel, source.name)
        done.differences += lines
    if theirs.shape != own.shape:
        raise UserError(
            f"{source.named}: tensor '{key}' has shape {old}, the encoder wants "
            f"{tuple(own.shape)}; {_COMPARE}"
        )
    if changed:
        done.resampled.append(changed)
    return theirs


def _check_unused(unused: list[str], encoder: PatchEncoder, source: Source) -> None:
    """Raise a ``UserError`` if the file has a part of an encoder that this one lacks."""
    check_thrown_away(unused, encoder, source)
    for key in unused:
        if not key.startswith(("norm.", "fc_norm.", "head.")):
            raise UserError(f"{source.named}: its tensor '{key}' is not in the encoder; {_COMPARE}")
