"""Large images shown to an encoder: scaled, then window by window, or whole."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from pospre.model.model import PretrainModel

Logits = Callable[[Tensor], Tensor]
"""From normalised images (B, 3, H, W), whose sides the patch divides, to logits (B, C, h, w)."""


class Showing(NamedTuple):
    """How images are shown.

    Attributes:
        size: their short side is scaled to it; None leaves it.
        window: height and width of a window; None: the image as a whole, padded to whole patches.
        patch: side of a patch.
    """

    size: int | None
    window: tuple[int, int] | None
    patch: int

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of an image after scaling."""
        factor = 1.0 if self.size is None else self.size / min(height, width)
        return round(height * factor), round(width * factor)

    def padded(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a scaled image after padding."""
        if self.window is not None:
            return max(height, self.window[0]), max(width, self.window[1])
        return -(-height // self.patch) * self.patch, -(-width // self.patch) * self.patch

    def windows(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Return the windows of a padded image: every two thirds of one, the last at the border."""
        if self.window is None:
            return [(slice(0, height), slice(0, width))]
        places = [
            [slice(at, at + side) for at in _places(length, side)]
            for length, side in zip((height, width), self.window, strict=True)
        ]
        return list(itertools.product(*places))


def show(model: PretrainModel, pixels: ndarray, showing: Showing) -> Tensor:
    """Return an image as it is shown: normalised, scaled, padded with zeros right and below.

    Args:
        model: says how to normalise, and on which device.
        pixels: uint8 (H, W, 3).
        showing: how.

    Returns:
        float32 (1, 3, H, W).
    """
    levels_1CHW = torch.tensor(pixels).permute(2, 0, 1).unsqueeze(0).to(model.augment.mean)
    image = model.augment.normalise(levels_1CHW)
    scaled = showing.scaled(*image.shape[-2:])
    image = F.interpolate(image, scaled, mode="bilinear", antialias=True)
    height, width = showing.padded(*scaled)
    return F.pad(image, (0, width - scaled[1], 0, height - scaled[0]))


def predict(logits_of: Logits, image: Tensor, showing: Showing, batch_size: int) -> Tensor:
    """Return the logits (1, C, H, W) of an image that is shown; where windows overlap, their mean.

    Args:
        logits_of: the segmenter.
        image: see ``show``.
        showing: how it was shown.
        batch_size: windows per forward pass; it does not change the result.
    """
    windows = showing.windows(*image.shape[-2:])
    parts: list[Tensor] = []
    for start in range(0, len(windows), batch_size):
        some = [image[0, :, rows, columns] for rows, columns in windows[start : start + batch_size]]
        logits = logits_of(torch.stack(some))
        parts += F.interpolate(logits, some[0].shape[-2:], mode="bilinear").unbind()
    total = image.new_zeros(1, len(parts[0]), *image.shape[-2:])
    times = image.new_zeros(1, 1, *image.shape[-2:])
    for (rows, columns), part in zip(windows, parts, strict=True):
        total[0, :, rows, columns] += part
        times[:, :, rows, columns] += 1
    return total / times


def _places(length: int, side: int) -> list[int]:
    last = length - side
    return [*range(0, last, max(1, round(side * 2 / 3))), last]
