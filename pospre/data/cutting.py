"""Decode once, cut many: from one opened image to all views of a sample.

A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size where no view can tell by more than the
tolerance, on average over photographs. Whether it may follows from the places of the views and the
image's size alone; the boxes are then moved to whole pixels of the smaller image, whether the file
can be decoded smaller or not. So the same sample has the same boxes in every storage format.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pospre.data.bill import Laps
from pospre.data.crops import Cut, PixelBox
from pospre.data.decode import OpenedImage, cut_view
from pospre.data.jpeg import SHRINKS

# Error of views, RMS in grey levels of 255 and mean over photographs, where images were decoded so
# small that they still have this many pixels per view pixel (tests/data/test_cutting.py measures).
_PIXELS_PER_PIXEL = ((3.6, 1.25), (2.6, 1.5), (2.0, 2.0), (1.1, 2.5), (0.9, 3.0), (0.75, 4.0))


class View(NamedTuple):
    """Where one view of a sample goes.

    Attributes:
        cut: its place in the full-size image.
        pixels: of the view, uint8 (h, w, channels), to be written.
        box: float32 (4,), to be written.
        interpolation: of its view group.
    """

    cut: Cut
    pixels: np.ndarray
    box: np.ndarray
    interpolation: str


def margin(tolerance: float) -> float:
    """Return how many decoded pixels per view pixel the tolerance asks for; infinity for never."""
    return next((pixels for error, pixels in _PIXELS_PER_PIXEL if error <= tolerance), float("inf"))


def choose_shrink(cuts: Sequence[Cut], pixels_per_pixel: float) -> int:
    """Return by how much an image may be decoded smaller: 8, 4, 2 or 1."""
    least = min(min(cut.box.width / cut.scaled[0], cut.box.height / cut.scaled[1]) for cut in cuts)
    return next((shrink for shrink in SHRINKS if least >= shrink * pixels_per_pixel), 1)


def snap(box: PixelBox, shrink: int, width: int, height: int) -> PixelBox:
    """Move a box to whole pixels of an image ``shrink`` times smaller, in those pixels.

    Of a box that is the whole image up to ``shrink`` − 1 lines are left out at the far sides.
    """
    left, across = _snap_side(box.left, box.width, width, shrink)
    top, down = _snap_side(box.top, box.height, height, shrink)
    return PixelBox(left, top, across, down)


def _snap_side(start: int, length: int, size: int, shrink: int) -> tuple[int, int]:
    length = min(max(1, round(length / shrink)), size // shrink)
    return min(round(start / shrink), size // shrink - length), length


def write_views(
    image: OpenedImage, views: Sequence[View], pixels_per_pixel: float, laps: Laps
) -> None:
    """Decode an image once and write all its views and their boxes.

    Raises:
        DecodeError: the image is cut off or damaged.
    """
    width, height = image.width, image.height
    cuts = [view.cut for view in views]
    shrink = choose_shrink(cuts, pixels_per_pixel)
    if any(view.interpolation == "area" for view in views):
        shrink = 1  # its steps fall elsewhere in a smaller image, which shows
    small = [cut.box for cut in cuts]
    if shrink > 1:
        small = [snap(cut.box, shrink, width, height) for cut in cuts]
        boxes = [PixelBox(*(shrink * side for side in box)) for box in small]
        cuts = [cut._replace(box=box) for cut, box in zip(cuts, boxes, strict=True)]
    laps.lap("plan")
    top = min(cut.box.top for cut in cuts)
    bottom = max(cut.box.top + cut.box.height for cut in cuts)
    picture, found, first = image.decode(shrink, top, bottom)
    laps.lap("decode")
    for view, cut, box in zip(views, cuts, small, strict=True):
        view.box[:] = cut.relative(width, height)
        decoded = box if found == shrink else cut.box
        decoded = decoded._replace(top=decoded.top - first // found)
        cut_view(picture, cut._replace(box=decoded), view.pixels, view.interpolation)
    laps.lap("resize")
