"""Patch kernels of weights for other patches and channels than their own.

``bicubic`` resizes a kernel as a picture and scales it by (old size / new size)², which keeps its
response to a constant image. ``pinv`` is FlexiViT's rule (Beyer et al. 2022, arXiv 2212.08013): the
pseudo-inverse of the bilinear resize of images, so that enlarged images have the same embeddings.
``timm`` is timm's version of it, with a bicubic, antialiased resize. Photographs that are decoded
at the new size have finer detail than enlarged ones; there ``bicubic`` stays closest.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed
from torch import Tensor

from pospre.nn.encoder_options import Kernel

KERNELS: dict[Kernel, str] = {
    "bicubic": "bicubic × (old / new)²",
    "pinv": "by FlexiViT's pseudo-inverse",
    "timm": "by timm's resample_patch_embed",
}
"""The rules in words."""


def resized_kernel(kernel_DCHW: Tensor, size: tuple[int, int], how: Kernel) -> Tensor:
    """Return a kernel (D, C, h, w) for patches of ``size`` pixels: float32."""
    kernel = kernel_DCHW.float()
    old = kernel.shape[2:]
    if how == "timm":
        return resample_patch_embed(kernel, [*size])
    if how == "bicubic":
        resized = F.interpolate(kernel, size, mode="bicubic", align_corners=False)
        return resized * (math.prod(old) / math.prod(size))
    units = torch.eye(math.prod(old), dtype=torch.float64).view(-1, 1, *old)
    resize = F.interpolate(units, size, mode="bilinear", align_corners=False).flatten(1)
    flat = kernel.double().flatten(2) @ torch.linalg.pinv(resize).T
    return flat.unflatten(2, size).float()


def with_channels(kernel_DCHW: Tensor, count: int) -> Tensor:
    """Return a kernel for ``count`` channels, the file's first: float32 (FINO's rule).

    Each new channel has the mean of the file's kernels, and all are scaled by old count / new
    count: an image with equal channels has the same embedding.
    """
    kernel, old = kernel_DCHW.float(), kernel_DCHW.shape[1]
    new = kernel.mean(dim=1, keepdim=True).expand(-1, count - old, -1, -1)
    return torch.cat([kernel, new], dim=1) * (old / count)


def becomes_grey(own: int, theirs: int) -> bool:
    """Return whether an encoder of ``own`` channels takes weights of ``theirs`` by ``to_grey``."""
    return (own, theirs) == (1, 3)


def to_grey(
    kernel_DCHW: Tensor,
    theirs: Mapping[str, Sequence[float]],
    own: Mapping[str, Sequence[float]],
) -> tuple[Tensor, Tensor]:
    """Return a kernel (D, 1, h, w) of grey images, and what to add to its bias (D,): float32.

    A grey image has the embedding that it has in equal channels.

    Args:
        kernel_DCHW: kernel of images in channels.
        theirs: ``mean`` and ``std`` that normalise those, one number per channel.
        own: the numbers that normalise grey images.
    """
    (mean_C, std_C), (mean, std) = (
        [torch.tensor([*each[key]]).double() for key in ("mean", "std")] for each in (theirs, own)
    )
    kernel = kernel_DCHW.double()
    grey = torch.einsum("dchw,c->dhw", kernel, std / std_C).unsqueeze(1)
    bias = torch.einsum("dchw,c->d", kernel, (mean - mean_C) / std_C)
    return grey.float(), bias.float()
