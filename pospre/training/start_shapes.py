"""Weights for an encoder of other patches, other channels, other pixels or more registers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import timm
from torch import Tensor

from pospre.augment.device import IMAGENET_MEAN, IMAGENET_STD
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.encoder_options import Kernel
from pospre.nn.weights.kernels import KERNELS, becomes_grey, resized_kernel, to_grey, with_channels
from pospre.nn.weights.timm_models import PREFIX, pixels_of
from pospre.training.weight_files import Source

KERNEL = "patch_embed.proj.weight"
_BIAS = "patch_embed.proj.bias"


def take_pixels(model: PretrainModel, source: Source) -> tuple[Source, list[str]]:
    """Normalise as the weights expect, or see ``_in_grey``; return the weights and what to say.

    A file that does not say it has its timm model's.
    """
    encoder, name = model.encoder, model.encoder.options.name
    pixels, whose = source.known.pixels, "the weights'"
    kernel = source.tensors.get(KERNEL)
    channels = encoder.channels if kernel is None else kernel.shape[1]
    is_silent = not (pixels or source.is_run or encoder.pixels_expected)
    if is_silent and name.startswith(PREFIX):
        config = timm.get_pretrained_cfg(name.removeprefix(PREFIX))
        if config is not None:
            pixels, whose = pixels_of(vars(config), channels), "timm's"
    if channels == encoder.channels:
        model.augment.expect(pixels, whose)
    return _in_grey(model, source, pixels)


def _in_grey(
    model: PretrainModel, source: Source, pixels: Mapping[str, Sequence[float]]
) -> tuple[Source, list[str]]:
    """Return weights for the channels of a model of grey images, and a line about it.

    Others stay as they are. ``pixels`` is what is known of how images are normalised for them.
    """
    kernel, bias = (source.tensors.get(key) for key in (KERNEL, _BIAS))
    own_count = model.encoder.channels
    if kernel is None or kernel.ndim != 4 or not becomes_grey(own_count, kernel.shape[1]):
        return source, []
    own = {key: getattr(model.augment, key).flatten().tolist() for key in ("mean", "std")}
    if bias is None or len(own["mean"]) > 1:
        why = "no bias" if bias is None else "one mean, but the data have one for each column"
        raise UserError(f"encoder.channels = 1, but {source.named} has 3 and {why}; use 3 channels")
    grey, more = to_grey(kernel, {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, **pixels}, own)
    tensors = {**source.tensors, KERNEL: grey, _BIAS: bias.float() + more}
    assumed = "" if pixels else " (of ImageNet's mean and deviation, assumed)"
    line = (
        f"encoder.channels = 1, but {source.name} has 3: its kernels are added up{assumed}, so a "
        "grey image has the features that it has in three equal channels"
    )
    return replace(source, tensors=tensors), [line]


def added_registers(encoder: PatchEncoder, source: Source) -> int:
    """Return how many gated registers the encoder has that the weights lack."""
    own = encoder.num_prefix_tokens - encoder.has_class_token
    tokens = source.tensors.get("reg_token")
    missing = own - (0 if tokens is None else tokens.shape[1])
    return max(0, min(missing, encoder.options.gated_registers))


def about_registers(own: Tensor, added: int, name: str) -> str:
    """Return a line about registers that the weights ``name`` lack."""
    return (
        f"encoder.num_registers = {own.shape[1]}, but {name} has {own.shape[1] - added}: {added} "
        "are new, with a gate on attention to them"
    )


def fitted_kernel(
    theirs: Tensor, own: Tensor, kernel: Kernel, name: str
) -> tuple[Tensor, list[str]]:
    """Return the patch kernel of the weights ``name`` for the encoder, and lines about it."""
    (old, *patch), (new, high, wide) = theirs.shape[1:], own.shape[1:]
    kernel_there, lines = theirs, []
    if patch != [high, wide]:
        kernel_there = resized_kernel(kernel_there, (high, wide), kernel)
        lines.append(
            f"encoder.patch_size = {high}×{wide}, but {name} has {patch[0]}×{patch[1]}: its kernel "
            f"is resized, {KERNELS[kernel]}"
        )
    if new > old:
        kernel_there = with_channels(kernel_there, new)
        lines.append(
            f"encoder.channels = {new}, but {name} has {old}: new channels have the mean of its "
            f"kernels, and all are scaled by {old}/{new}"
        )
    return kernel_there, lines
