"""Weights for an encoder with other patches, more channels or more registers than theirs."""

from torch import Tensor

from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.encoder_options import Kernel
from pospre.nn.weights.kernels import KERNELS, resized_kernel, with_channels
from pospre.training.weight_files import Source


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
