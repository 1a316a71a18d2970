"""Where views lie in an image: pure functions of draws and the image's size.

A view is a window of a resized part of the image. For most crops that part is a box and the window
is all of it. *Simple resized crop* and *padded crop* resize the whole image instead and let the
window reach a few pixels over its edge; the *centre* view of evaluations is a window in its middle.

The functions of draws are written for whole arrays of views, in numpy or torch: they say what a
view's place is. ``pospre.portable_math`` has them compiled for one image; all give the same bits.
"""

import functools
from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre import portable_math as exact
from pospre.draws import Keys
from pospre.portable_math import DRAWS_PER_TRY, NUM_TRIES, round_half_even

NUM_BOX_DRAWS = NUM_TRIES * DRAWS_PER_TRY
NUM_WINDOW_DRAWS = 2  # left, top
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


class Cuts(NamedTuple):
    """All views of a group in one image: windows of boxes of the image that are resized first.

    Attributes:
        boxes: left, top, width, height of the parts of the image that are resized, int64 (V, 4).
        scaled: (width, height) that each is resized to.
        windows: left, top, width, height of the views in pixels of the resized boxes, int64 (V, 4);
            they may reach over the edge. None: the views are the resized boxes.
        image: width and height of the upright image.
        edge: what lies beyond a resized box: ``"reflect"`` mirrors the pixels, ``"black"`` is 0.
    """

    boxes: np.ndarray
    scaled: tuple[int, int]
    windows: np.ndarray | None
    image: tuple[int, int]
    edge: str = "black"

    @property
    def relative(self) -> np.ndarray:
        """Return x0, y0, x1, y1 of the views as parts of the image, float32 (V, 4).

        A window that reaches over the edge gives values a little below 0 or above 1: so the place
        of every pixel that is the image's own stays right.
        """
        return exact.relative_boxes(self.boxes, self.windows, self.scaled, self.image)


class Frame(NamedTuple):
    """A whole image resized, out of which windows of one size are taken at random.

    Attributes:
        scaled: (width, height) that the image is resized to.
        size: (width, height) of a window.
        padding: how many pixels a window may reach over each edge.
        edge: what lies beyond the edge.
    """

    scaled: tuple[int, int]
    size: tuple[int, int]
    padding: int
    edge: str


def whole_cuts(boxes: np.ndarray, image: tuple[int, int], size: tuple[int, int]) -> Cuts:
    """Return boxes (V, 4) of an image resized to views of ``size`` (height, width)."""
    return Cuts(boxes, size[::-1], None, image)


def random_boxes(
    draw: Keys,
    widths: Keys | int,
    heights: Keys | int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Keys:
    """Return boxes with the distribution of torchvision's ``RandomResizedCrop.get_params``.

    Ten tries: the area is uniform in ``scale``, the logarithm of width / height in that of
    ``ratio``; both sides are rounded. The first that fits into the image gets a random place in it.
    Where none fits, it is the largest central box whose width / height lies in the range.

    Args:
        draw: (…, 40) numbers in [0, 1): area, log ratio, left and top for each try.
        widths: of the images, in pixels, (…); or one for all.
        heights: of the images, in pixels.
        scale: range of the box area as a fraction of the image area.
        ratio: range of width / height.

    Returns:
        left, top, width, height, int64 (…, 4), of the library and device of ``draw``.
    """
    backend: Any = torch if isinstance(draw, Tensor) else np
    tries, width, height = _float64(draw, draw), _float64(widths, draw), _float64(heights, draw)
    box = _fallback_boxes(width, height, ratio, backend)
    for start in range(NUM_BOX_DRAWS - DRAWS_PER_TRY, -1, -DRAWS_PER_TRY):  # the first that fits
        area_draw, ratio_draw, left_draw, top_draw = (tries[..., start + i] for i in range(4))
        squares = exact.squared_sides(
            width * height, area_draw, ratio_draw, scale, log_range(ratio)
        )
        across, down = (round_half_even(backend.sqrt(square)) for square in squares)
        left = backend.floor(left_draw * (width - across + 1))
        top = backend.floor(top_draw * (height - down + 1))
        fits = (across > 0) & (across <= width) & (down > 0) & (down <= height)
        pairs = zip((left, top, across, down), box, strict=True)
        box = [backend.where(fits, new, old) for new, old in pairs]
    return _whole(backend.stack(box, -1))


def _fallback_boxes(width: Any, height: Any, ratio: tuple[float, float], backend: Any) -> list[Any]:
    one = width * 0 + 1
    widest, highest = round_half_even(height * ratio[1]), round_half_even(width / ratio[0])
    across = backend.minimum(width, backend.maximum(one, widest))
    down = backend.minimum(height, backend.maximum(one, highest))
    return [backend.floor((width - across) / 2), backend.floor((height - down) / 2), across, down]


@functools.cache
def log_range(ratio: tuple[float, float]) -> tuple[float, float]:
    """Return the natural logarithms, correctly rounded (which ``math.log`` does not promise)."""
    with localcontext(prec=40):
        return float(Decimal(ratio[0]).ln()), float(Decimal(ratio[1]).ln())


def random_windows(draw: Keys, frame: Frame) -> Keys:
    """Return windows at random places in a frame: left, top, width, height, int64 (…, 4).

    Args:
        draw: (…, 2) numbers in [0, 1): left and top.
        frame: what they are taken out of.
    """
    backend: Any = torch if isinstance(draw, Tensor) else np
    places = _float64(draw, draw)
    columns = []
    for axis in range(2):
        room = frame.scaled[axis] + 2 * frame.padding - frame.size[axis] + 1
        columns.append(backend.floor(places[..., axis] * room) - frame.padding)
    columns += [columns[0] * 0 + side for side in frame.size]
    return _whole(backend.stack(columns, -1))


def _float64(values: Any, like: Keys) -> Any:
    if isinstance(like, Tensor):
        return torch.as_tensor(values, dtype=torch.float64, device=like.device)
    return np.asarray(values, np.float64)


def _whole(values: Keys) -> Keys:
    return values.to(torch.int64) if isinstance(values, Tensor) else values.astype(np.int64)


def center_window(
    width: int, height: int, size: tuple[int, int]
) -> tuple[tuple[int, int], PixelBox]:
    """Return what an image is resized to for evaluation, and the central window of that.

    As torchvision's ``Resize(256)`` and ``CenterCrop(224)`` do for a view of 224: the short side
    becomes 256/224 of the view's, the long one keeps the shape (cut to a whole number).

    Args:
        width: of the image (see ``simple_box``), in pixels.
        height: likewise.
        size: (height, width) of the view. Where it is no square, the resized image is the smallest
            that has 256/224 of both sides.
    """
    down, across = (int(side * _CENTER_MARGIN) for side in size)
    if across * height >= down * width:
        scaled = (across, across * height // width)
    else:
        scaled = (down * width // height, down)
    left, top = (round((all_ - part) / 2) for all_, part in zip(scaled, size[::-1], strict=True))
    return scaled, PixelBox(left, top, size[1], size[0])


def simple_box(width: int, height: int) -> PixelBox:
    """Return the part of an image that is resized before windows are taken: all of it, as a rule.

    Of very thin images it is the centre: to bring one of 4000 x 1 pixels up to 224 rows would take
    gigabytes.
    """
    across, down = min(width, _THINNEST * height), min(height, _THINNEST * width)
    return PixelBox((width - across) // 2, (height - down) // 2, across, down)


def simple_frame(width: int, height: int, side: int) -> Frame:
    """Return the frame of DeiT III's simple resized crop.

    The short side becomes ``side``, the long one keeps the shape (its length cut to a whole
    number); four mirrored pixels are added all around; a square is taken at random.

    Args:
        width: of the image (see ``simple_box``), in pixels.
        height: likewise.
        side: of the view.
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
