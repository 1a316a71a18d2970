"""Where views lie in an image: pure functions of draws and the image's size.

A view is a window of a resized part of the image. For most crops that part is a box and the window
is all of it. *Simple resized crop* and *padded crop* resize the whole image instead and let the
window reach a few pixels over its edge.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

_DRAWS_PER_TRY = 4  # area, aspect ratio, left, top
NUM_RANDOM_DRAWS = 10 * _DRAWS_PER_TRY
_CENTER_RATIO = 224 / 256  # of the short side, as in "resize to 256, take the central 224"
_SIMPLE_PADDING = 4
_PADDED_PART = 8  # padding of a padded crop: 4 of 32 pixels


class PixelBox(NamedTuple):
    """A part of the upright image in whole pixels."""

    left: int
    top: int
    width: int
    height: int


class Cut(NamedTuple):
    """A view: a window of a box of the image that is resized first.

    Attributes:
        box: the part of the image that is resized.
        scaled: (width, height) that it is resized to.
        window: the view in pixels of the resized box; it may reach over the edge.
        edge: what lies beyond: ``"reflect"`` mirrors the pixels, ``"black"`` is 0.
    """

    box: PixelBox
    scaled: tuple[int, int]
    window: PixelBox
    edge: str = "black"

    @property
    def is_whole(self) -> bool:
        """Whether the window is the resized box."""
        return self.window == PixelBox(0, 0, *self.scaled)

    def relative(self, image_width: int, image_height: int) -> tuple[float, float, float, float]:
        """Return x0, y0, x1, y1 of the view as parts of the image.

        A window that reaches over the edge gives values a little below 0 or above 1: so the place
        of every pixel that is the image's own stays right.
        """
        (left, top, width, height), window = self.box, self.window

        def across(column: int) -> float:
            return (left + column * width / self.scaled[0]) / image_width

        def down(row: int) -> float:
            return (top + row * height / self.scaled[1]) / image_height

        right, bottom = window.left + window.width, window.top + window.height
        return across(window.left), down(window.top), across(right), down(bottom)


def whole_cut(box: PixelBox, size: tuple[int, int]) -> Cut:
    """Return a box resized to a view of ``size`` (height, width)."""
    height, width = size
    return Cut(box, (width, height), PixelBox(0, 0, width, height))


def random_box(
    draw: Sequence[float],
    width: int,
    height: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> PixelBox:
    """Return a box with the distribution of torchvision's ``RandomResizedCrop.get_params``.

    Args:
        draw: 40 numbers in [0, 1): area, log ratio, left and top for each of ten tries.
        width: of the image, in pixels.
        height: of the image, in pixels.
        scale: range of the box area as a fraction of the image area.
        ratio: range of width / height.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for start in range(0, len(draw), _DRAWS_PER_TRY):
        area_draw, ratio_draw, left_draw, top_draw = draw[start : start + _DRAWS_PER_TRY]
        area = width * height * (scale[0] + (scale[1] - scale[0]) * area_draw)
        aspect = math.exp(low + (high - low) * ratio_draw)
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(left_draw * (width - box_width + 1))
            top = int(top_draw * (height - box_height + 1))
            return PixelBox(left, top, box_width, box_height)
    return _fallback_box(width, height, ratio)


def _fallback_box(width: int, height: int, ratio: tuple[float, float]) -> PixelBox:
    """Return the largest central box whose aspect ratio lies in the range."""
    aspect = width / height
    box_width, box_height = width, height
    if aspect < ratio[0]:
        box_height = min(height, max(1, round(width / ratio[0])))
    elif aspect > ratio[1]:
        box_width = min(width, max(1, round(height * ratio[1])))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return PixelBox(left, top, box_width, box_height)


def center_box(width: int, height: int, size: tuple[int, int] = (1, 1)) -> PixelBox:
    """Return the central box of the shape ``size`` (height, width), 224/256 of the largest one."""
    largest = min(width * size[0], height * size[1])
    box_width = max(1, round(largest / size[0] * _CENTER_RATIO))
    box_height = max(1, round(largest / size[1] * _CENTER_RATIO))
    return PixelBox((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


def simple_cut(draw: Sequence[float], width: int, height: int, side: int) -> Cut:
    """Return DeiT III's simple resized crop.

    The short side becomes ``side``, the long one keeps the shape (its length cut to a whole
    number); four mirrored pixels are added all around; a square is taken at random.

    Args:
        draw: two numbers in [0, 1): left and top.
        width: of the image, in pixels.
        height: of the image, in pixels.
        side: of the view.
    """
    short = min(width, height)
    scaled = (int(side * width / short), int(side * height / short))
    image = PixelBox(0, 0, width, height)
    return _padded_window(draw, image, scaled, (side, side), _SIMPLE_PADDING, "reflect")


def padded_cut(draw: Sequence[float], width: int, height: int, size: tuple[int, int]) -> Cut:
    """Return the crop usual for CIFAR: the image at ``size``, black padding, a random window.

    An eighth of the short side is added on each side (4 of 32 pixels).
    """
    padding = min(size) // _PADDED_PART
    image = PixelBox(0, 0, width, height)
    return _padded_window(draw, image, (size[1], size[0]), size, padding, "black")


def _padded_window(
    draw: Sequence[float],
    box: PixelBox,
    scaled: tuple[int, int],
    size: tuple[int, int],
    padding: int,
    edge: str,
) -> Cut:
    left = int(draw[0] * (scaled[0] + 2 * padding - size[1] + 1)) - padding
    top = int(draw[1] * (scaled[1] + 2 * padding - size[0] + 1)) - padding
    return Cut(box, scaled, PixelBox(left, top, size[1], size[0]), edge)
