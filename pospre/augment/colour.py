"""Colour operations with their own parameters for every image, in fixed shapes.

Images are float levels (N, 3, H, W) from 0 to 255; results are not rounded to whole levels. With
the same parameters each operation equals that of ``torchvision.transforms.v2.functional`` for float
images. The result of an image is bit-equal in any batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

WHITE = 255.0

_LUMA = (0.2989, 0.587, 0.114)  # torchvision's: Rec. 601 to four digits
_FIXED_POINT = 2.0**12
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)


Rows = Tensor | slice


def change_some(
    images_N3HW: Tensor, chosen_N: Tensor, change: Callable[[Tensor, Rows], Tensor]
) -> Tensor:
    """Return the images with the chosen ones changed.

    ``change`` returns images changed, given some of them and which rows of all they are.
    """
    fixed = torch.compiler.is_compiling() or isinstance(images_N3HW, FakeTensor)
    if fixed or images_N3HW.device.type != "cpu":
        # fixed shapes for the compiler and a plan, and no wait for the accelerator to tell how many
        return torch.where(spread(chosen_N), change(images_N3HW, slice(None)), images_N3HW)
    rows = chosen_N.nonzero()[:, 0]
    if len(rows) == 0:
        return images_N3HW
    return images_N3HW.index_copy(0, rows, change(images_N3HW[rows], rows))


def luma(levels_N3HW: Tensor) -> Tensor:
    """Return the grey images (N, 1, H, W)."""
    red, green, blue = levels_N3HW.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def jitter(
    levels_N3HW: Tensor, factors_N3: Tensor, turns_N: Tensor | None, order_N4: Tensor
) -> Tensor:
    """Change brightness, contrast, saturation and hue, in each image's own order.

    ``factors_N3`` are of brightness, contrast and saturation (1 changes nothing), ``turns_N``
    shifts of the hue in full turns (None: none), ``order_N4`` permutations of those four
    operations.
    """
    # The hue is turned once, for all images together. In an image's order, up to three other steps
    # come before it and up to three after. At a step that is not the image's, the factor is 1.
    hue_step_N = (order_N4 == _HUE).to(torch.int64).argmax(dim=1)

    def steps(levels: Tensor, numbers: range, is_on: Callable[[int], Tensor]) -> Tensor:
        for step in numbers:
            which_N = order_N4[:, step]
            factor_N = factors_N3.gather(1, which_N.clamp(max=_SATURATION)[:, None])[:, 0]
            factor_N = torch.where(is_on(step), factor_N, 1.0)
            levels = _blend(levels, which_N, factor_N)
        return levels

    before = steps(levels_N3HW, range(3), lambda step: hue_step_N > step)
    turned = before if turns_N is None else turn_hue(before, turns_N)
    return steps(turned, range(1, 4), lambda step: hue_step_N < step)


def _blend(levels_N3HW: Tensor, which_N: Tensor, factor_N: Tensor) -> Tensor:
    """Move away from, or towards, black (brightness), the mean grey (contrast) or the own grey."""
    luma_N1HW = luma(levels_N3HW)
    which = spread(which_N)
    base = torch.where(which == _SATURATION, luma_N1HW, spread(_mean(luma_N1HW)))
    base = torch.where(which == _BRIGHTNESS, 0.0, base)
    factor = spread(factor_N)
    return (factor * levels_N3HW + (1 - factor) * base).clamp(0, WHITE)


def _mean(luma_N1HW: Tensor) -> Tensor:
    """Return the mean (N,) of whole numbers, with the same bits in any order of addition."""
    whole = (luma_N1HW * _FIXED_POINT).round().to(torch.int64).flatten(1)
    return (whole.sum(dim=1).double() / (whole.shape[1] * _FIXED_POINT)).to(luma_N1HW.dtype)


def turn_hue(levels_N3HW: Tensor, turns_N: Tensor) -> Tensor:
    """Turn the hue in HSV space; a turn by 0 leaves an image unchanged."""
    red, green, blue = levels_N3HW.split(1, dim=1)
    value, low = levels_N3HW.amax(1, keepdim=True), levels_N3HW.amin(1, keepdim=True)
    chroma = value - low
    span = torch.where(chroma == 0, 1.0, chroma)
    sixths = torch.where(
        value == red,
        (green - blue) / span,
        torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span),
    )
    turned = sixths + 6 * spread(turns_N)
    channels = []
    for offset in (5, 3, 1):  # red, green, blue: HSV to RGB in closed form
        k = torch.remainder(turned + offset, 6.0)
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.where(spread(turns_N) == 0, levels_N3HW, torch.cat(channels, dim=1))


def grey(levels_N3HW: Tensor) -> Tensor:
    """Return the images without colour."""
    return luma(levels_N3HW).expand_as(levels_N3HW)


def blur(levels_N3HW: Tensor, sigma_N: Tensor, kernel: int) -> Tensor:
    """Blur by Gaussians of standard deviations ``sigma_N`` in a window of ``kernel`` pixels."""
    half = kernel // 2
    offsets = torch.arange(-half, half + 1, device=sigma_N.device, dtype=sigma_N.dtype)
    weights_NK = torch.softmax(-0.5 * (offsets / sigma_N[:, None]) ** 2, dim=1)
    padded = functional.pad(levels_N3HW, (half, half, half, half), mode="reflect")
    return _slide(_slide(padded, weights_NK, dim=3), weights_NK, dim=2)


def _slide(images_N3HW: Tensor, weights_NK: Tensor, dim: int) -> Tensor:
    """Return the weighted sum of shifted images along ``dim``, which becomes K − 1 shorter.

    Not a convolution: its kernels would add up in an order that depends on the batch.
    """
    size = images_N3HW.shape[dim] - weights_NK.shape[1] + 1
    total = spread(weights_NK[:, 0]) * images_N3HW.narrow(dim, 0, size)
    for shift in range(1, weights_NK.shape[1]):
        total = total + spread(weights_NK[:, shift]) * images_N3HW.narrow(dim, shift, size)
    return total


def solarise(levels_N3HW: Tensor, threshold: float) -> Tensor:
    """Invert the levels from ``threshold`` on."""
    return torch.where(levels_N3HW >= threshold, WHITE - levels_N3HW, levels_N3HW)


def spread(values_N: Tensor, ndim: int = 4) -> Tensor:
    """Return per-image values so that they broadcast over ``ndim`` dimensions."""
    return values_N.view(-1, *(1,) * (ndim - 1))
