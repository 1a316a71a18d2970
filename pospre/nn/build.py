"""Build encoders by name; all options are checked first."""

from dataclasses import replace

import timm

from pospre.arguments import taking
from pospre.errors import UserError, suggestion
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.sizes import SIZES, EncoderSize, pair
from pospre.nn.swin.encoder import SWIN, build_swin
from pospre.nn.vit import Encoder
from pospre.nn.weights.timm_models import PREFIX, timm_size

_MOST_PATCHES = 1 << 20  # of an image


@taking(EncoderOptions)
def build_encoder(options: EncoderOptions) -> PatchEncoder:
    """Build an encoder by name.

    Raises:
        UserError: the name is unknown, the patch size does not divide the image size, or a value is
            out of range.
    """
    if options.name == SWIN:
        return build_swin(options)
    size = encoder_size(options)
    if options.window is not None:
        raise UserError(
            f"encoder.window = {options.window} is for swin_tiny; {options.name} has no windows."
        )
    if options.gated_registers > options.num_registers:
        raise UserError(
            f"encoder.gated_registers = {options.gated_registers}, but encoder.num_registers = "
            f"{options.num_registers}; give at most as many."
        )
    patch = pair(options.patch_size or size.patch_size)
    for side, part in zip(pair(options.image_size), patch, strict=True):
        check_divides(side, part, key="encoder.image_size")
    rows, columns = (s // p for s, p in zip(pair(options.image_size), patch, strict=True))
    if rows * columns > _MOST_PATCHES:
        raise UserError(
            f"encoder.image_size = {options.image_size} has {rows * columns} patches of "
            f"{patch[0]} x {patch[1]} pixels; use at most {_MOST_PATCHES}."
        )
    return Encoder(size, options)


def encoder_size(options: EncoderOptions) -> EncoderSize:
    """Return the size of a ViT with the heads of these options.

    Raises:
        UserError: the name is unknown, or the heads do not divide the width.
    """
    name, heads = options.name, options.num_heads
    if name not in SIZES and not name.startswith(PREFIX):
        known = [f"{PREFIX}{name}"] if timm.is_model(name) else [*SIZES, SWIN]
        raise UserError(f"encoder.name is '{name}'.{suggestion(name, known)}")
    size = SIZES[name] if name in SIZES else timm_size(name)
    if heads is not None and size.embed_dim % heads:
        raise UserError(
            f"encoder.num_heads = {heads} does not divide the width of {name}, {size.embed_dim}."
        )
    return replace(size, num_heads=heads or size.num_heads)


def check_divides(side: int, patch: int, *, key: str) -> None:
    """Raise ``UserError`` naming ``key`` unless ``patch`` divides ``side``."""
    if side % patch:
        near = max(patch, round(side / patch) * patch)
        raise UserError(
            f"{key} = {side} is not divisible by the patch size {patch}. "
            f"Use {near}, or another encoder.patch_size."
        )
