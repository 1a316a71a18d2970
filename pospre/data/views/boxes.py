"""Positions of views in an image: pure functions of draws and the image's size.

A view is a window of a resized part of the image. For most crops this part is a box, and the window
is all of it. *Simple resized crop* and *padded crop* resize the whole image instead, and the window
may reach a few pixels over its edge. The *centre* view of evaluations is a window in the middle.

Only + − × ÷ and √ on float64 are used, whose results IEEE 754 defines exactly: a box is the same on
every machine. Compiled, the views of an image take a few microseconds.
"""

import functools
import math
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from pospre.portable_math import compiled

NUM_BOX_DRAWS = 40
NUM_WINDOW_DRAWS = 2  # left, top
_DRAWS_PER_TRY = 4  # area, aspect ratio, left, top
_TO_WHOLE = 2.0**52  # float64 has no fractions from here on
_HALVINGS = 5
_EXP_TERMS = tuple(1 / math.factorial(power) for power in range(12, -1, -1))
_CENTER_MARGIN = 256 / 224  # "resize to 256, take the central 224"
_THINNEST = 8  # long side over short side
_SIMPLE_PADDING = 4
_PADDED_PART = 8  # padding of a padded crop: 4 of 32 pixels


class PixelBox(NamedTuple):
    """A part of the upright image in whole pixels."""

    left: int
    top: int
    width: int
    height: int


class Crops(NamedTuple):
    """All views of a group in one image: windows of boxes of the image that are resized first.

    Attributes:
        boxes: left, top, width, height of the parts of the image to resize, int64 (V, 4).
        scaled: (width, height) after resizing.
        windows: left, top, width, height of the views in pixels of the resized boxes, int64 (V, 4);
            they may reach over the edge. None: the views are the resized boxes.
        image: width and height of the upright image.
        edge: content beyond a resized box: ``"reflect"`` mirrors the pixels, ``"black"`` is 0.
        within: boxes (V, 4) of other views that these must stay inside; None: the image.
    """

    boxes: np.ndarray
    scaled: tuple[int, int]
    windows: np.ndarray | None
    image: tuple[int, int]
    edge: str = "black"
    within: np.ndarray | None = None

    @property
    def relative(self) -> np.ndarray:
        """Return x0, y0, x1, y1 of the views as parts of the image, float32 (V, 4).

        A window that reaches over the edge gives values slightly below 0 or above 1, so that the
        positions of the image's pixels stay correct.
        """
        return _relative_boxes(self.boxes, self.windows, self.scaled, self.image)


class Frame(NamedTuple):
    """A whole resized image, from which windows of one size are taken at random.

    Attributes:
        size: (width, height) of a window.
        padding: number of pixels that a window may reach over each edge.
    """

    scaled: tuple[int, int]
    size: tuple[int, int]
    padding: int
    edge: str


def box_crops(boxes: np.ndarray, image: tuple[int, int], size: tuple[int, int]) -> Crops:
    """Return boxes (V, 4) of an image resized to views of ``size`` (height, width)."""
    return Crops(boxes, size[::-1], None, image)


def random_boxes(
    draws: np.ndarray,
    image: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    """Return boxes with the distribution of torchvision's ``RandomResizedCrop.get_params``.

    Up to ten tries: the area is uniform in ``scale``, the logarithm of width / height in that of
    ``ratio``; both sides are rounded. The first box that fits into the image gets a random
    position. If none fits, it is the largest central box whose width / height is in the range.

    Args:
        draws: float64 (V, 40) in [0, 1): area, log ratio, left and top for each try.
        image: width and height in pixels.
        scale: range of the box area as a fraction of the image area.
        ratio: range of width / height.

    Returns:
        left, top, width, height, int64 (V, 4).
    """
    # integers would cause a second compilation
    low, high = float(scale[0]), float(scale[1])
    narrow, wide = float(ratio[0]), float(ratio[1])
    boxes: np.ndarray = _random_boxes(draws, image, (low, high), (narrow, wide), log_range(ratio))
    return boxes


def boxes_within(
    draws: np.ndarray, outer: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """Return ``random_boxes`` of an image, each inside a box of ``outer`` (V, 4)."""
    boxes = [
        random_boxes(draw[None], (int(width), int(height)), scale, ratio)
        for draw, (_, _, width, height) in zip(draws, outer, strict=True)
    ]
    all_boxes = np.concatenate(boxes)
    all_boxes[:, :2] += outer[:, :2]
    return all_boxes


@functools.cache
def log_range(ratio: tuple[float, float]) -> tuple[float, float]:
    """Return the natural logarithms, correctly rounded (which ``math.log`` does not promise)."""
    with localcontext(prec=40):
        return float(Decimal(ratio[0]).ln()), float(Decimal(ratio[1]).ln())


def random_windows(draws: np.ndarray, frame: Frame) -> np.ndarray:
    """Return windows at random positions in a frame: left, top, width, height, int64 (V, 4)."""
    windows: np.ndarray = _random_windows(draws, frame.scaled, frame.size, frame.padding)
    return windows


def center_window(
    width: int, height: int, size: tuple[int, int]
) -> tuple[tuple[int, int], PixelBox]:
    """Return the size of the resized image for evaluation, and its central window.

    Like torchvision's ``Resize(256)`` and ``CenterCrop(224)`` for a view of 224. The short side
    becomes 256/224 of the view's. The long side keeps the shape (cut to a whole number). For a view
    of another shape, the resized image is the smallest with 256/224 of both sides.
    """
    down, across = (int(side * _CENTER_MARGIN) for side in size)
    if across * height >= down * width:
        scaled = (across, across * height // width)
    else:
        scaled = (down * width // height, down)
    left, top = (round((all_ - part) / 2) for all_, part in zip(scaled, size[::-1], strict=True))
    return scaled, PixelBox(left, top, size[1], size[0])


def simple_box(width: int, height: int) -> PixelBox:
    """Return the part of an image that is resized before windows are taken, usually all of it.

    For very thin images it is the centre: resizing one of 4000 x 1 pixels to 224 rows would take
    gigabytes.
    """
    across, down = min(width, _THINNEST * height), min(height, _THINNEST * width)
    return PixelBox((width - across) // 2, (height - down) // 2, across, down)


def simple_frame(width: int, height: int, side: int) -> Frame:
    """Return the frame of DeiT III's simple resized crop.

    The short side becomes ``side``, and the long side keeps the shape (cut to a whole number). Four
    mirrored pixels are added all around. A square is taken at random.
    """
    short = min(width, height)
    scaled = (int(side * width / short), int(side * height / short))
    return Frame(scaled, (side, side), _SIMPLE_PADDING, "reflect")


def padded_frame(size: tuple[int, int]) -> Frame:
    """Return the frame usual for CIFAR: the image at ``size`` (height, width) in black padding.

    An eighth of the short side is added on each side (4 of 32 pixels).
    """
    upright = (size[1], size[0])
    return Frame(upright, upright, min(size) // _PADDED_PART, "black")


@register_jitable
def round_half_even(value: float) -> float:
    """Round a number from 0 to 2**51 to an integer, ties to even, as ``round`` does."""
    return (value + _TO_WHOLE) - _TO_WHOLE


@register_jitable
def exp(value: float) -> float:
    """Return e to the power of a number; for |x| ≤ 8 with relative error below 2**-46.

    The Taylor series of degree 12 at x/32, squared five times.
    """
    small, total = value * 0.5**_HALVINGS, 0.0
    for term in _EXP_TERMS:
        total = total * small + term
    for _ in range(_HALVINGS):
        total = total * total
    return total


@register_jitable
def _random_box(
    draw: np.ndarray,
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    log_ratio: tuple[float, float],
) -> Any:
    area = float(width) * float(height)
    for first in range(0, len(draw), _DRAWS_PER_TRY):
        part = area * (scale[0] + (scale[1] - scale[0]) * draw[first])
        aspect = exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * draw[first + 1])
        across = round_half_even(math.sqrt(part * aspect))
        down = round_half_even(math.sqrt(part / aspect))
        if 0 < across <= width and 0 < down <= height:
            left = int(draw[first + 2] * (width - across + 1))
            top = int(draw[first + 3] * (height - down + 1))
            return left, top, int(across), int(down)
    across = min(width, max(1, int(round_half_even(height * ratio[1]))))
    down = min(height, max(1, int(round_half_even(width / ratio[0]))))
    return (width - across) // 2, (height - down) // 2, across, down


@compiled
def _random_boxes(
    draws: np.ndarray,
    image: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    log_ratio: tuple[float, float],
) -> Any:
    boxes = np.empty((len(draws), 4), np.int64)
    for view in range(len(draws)):
        box = _random_box(draws[view], image[0], image[1], scale, ratio, log_ratio)
        for column in range(4):
            boxes[view, column] = box[column]
    return boxes


@compiled
def _random_windows(
    draws: np.ndarray, scaled: tuple[int, int], size: tuple[int, int], padding: int
) -> Any:
    windows = np.empty((len(draws), 4), np.int64)
    for view in range(len(draws)):
        for axis in range(2):
            room = scaled[axis] + 2 * padding - size[axis] + 1
            windows[view, axis] = int(draws[view, axis] * room) - padding
            windows[view, 2 + axis] = size[axis]
    return windows


@compiled
def _relative_boxes(
    boxes: np.ndarray, windows: np.ndarray | None, scaled: tuple[int, int], image: tuple[int, int]
) -> Any:
    relative = np.empty((len(boxes), 4), np.float32)
    for view in range(len(boxes)):
        for axis in range(2):
            left, length = boxes[view, axis], boxes[view, 2 + axis]
            first, last = 0, scaled[axis]
            if windows is not None:
                first, last = windows[view, axis], windows[view, axis] + windows[view, 2 + axis]
            relative[view, axis] = (left + first * length / scaled[axis]) / image[axis]
            relative[view, 2 + axis] = (left + last * length / scaled[axis]) / image[axis]
    return relative


@compiled
def hull(boxes: np.ndarray) -> Any:
    """Return left, top, right and bottom of the smallest box around all boxes, int64 (V, 4)."""
    left, top = boxes[0, 0], boxes[0, 1]
    right, bottom = left + boxes[0, 2], top + boxes[0, 3]
    for view in range(1, len(boxes)):
        left, top = min(left, boxes[view, 0]), min(top, boxes[view, 1])
        right = max(right, boxes[view, 0] + boxes[view, 2])
        bottom = max(bottom, boxes[view, 1] + boxes[view, 3])
    return left, top, right, bottom
