"""Decode once, cut many: from one opened image to all views of a sample.

A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size where no view can tell by more than the
tolerance, on average over photographs. Whether it may follows from the places of the views and the
image's size alone; the boxes are then moved to whole pixels of the smaller image, whether the file
can be decoded smaller or not. So the same sample has the same boxes in every storage format.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pospre.data.decode.decoder import OpenedImage
from pospre.data.decode.jpeg import SHRINKS, Box
from pospre.data.timing import Laps
from pospre.data.views.boxes import Cuts, hull
from pospre.data.views.resize import Views, cut_views

# Error of views, RMS in grey levels of 255 and mean over photographs, where images were decoded so
# small that they still have this many pixels per view pixel (``test_cut`` measures).
_PIXELS_PER_PIXEL = ((3.6, 1.25), (2.6, 1.5), (2.0, 2.0), (1.1, 2.5), (0.9, 3.0), (0.75, 4.0))


def margin(tolerance: float) -> float:
    """Return how many decoded pixels per view pixel the tolerance asks for; infinity for never."""
    return next((pixels for error, pixels in _PIXELS_PER_PIXEL if error <= tolerance), float("inf"))


def choose_shrink(groups: Sequence[Cuts], pixels_per_pixel: float) -> int:
    """Return by how much an image may be decoded smaller: 8, 4, 2 or 1."""
    ratios = [
        side / view for cuts in groups for side, view in zip(cuts.image, cuts.scaled, strict=True)
    ]
    if min(ratios) < min(SHRINKS) * pixels_per_pixel:
        return 1  # as for most photographs; the boxes need not be looked at
    least = min(float((cuts.boxes[:, 2:] / cuts.scaled).min()) for cuts in groups)
    return next((shrink for shrink in SHRINKS if least >= shrink * pixels_per_pixel), 1)


def snap(boxes: np.ndarray, shrink: int, width: int, height: int) -> np.ndarray:
    """Move boxes (V, 4) to whole pixels of an image ``shrink`` times smaller, in those pixels.

    Of a box that is the whole image up to ``shrink`` − 1 lines are left out at the far sides.
    """
    sides = np.array([width // shrink, height // shrink])
    wanted = np.rint(boxes / shrink).astype(np.int64)
    lengths = np.minimum(np.maximum(wanted[:, 2:], 1), sides)
    return np.hstack([np.minimum(wanted[:, :2], sides - lengths), lengths])


class Cutting(NamedTuple):
    """All views of one opened image, before it is decoded.

    Attributes:
        image: the image.
        shrink: by how much it may be decoded smaller.
        groups: its views, in the full-size image.
        small: in the smaller one.
        needed: the part of the full-size image that holds all of them.
    """

    image: OpenedImage
    shrink: int
    groups: Sequence[Views]
    small: Sequence[Views]
    needed: Box


def plan_cutting(
    image: OpenedImage,
    groups: Sequence[Views],
    places: Sequence[np.ndarray],
    pixels_per_pixel: float,
) -> Cutting:
    """Choose how an image is decoded, and say where its views will lie.

    Args:
        image: the image.
        groups: its views, in the full-size image.
        places: of each group's views as parts of the image, float32 (V, 4), to be written.
        pixels_per_pixel: decoded ones that a view's must have at least: see ``margin``.
    """
    shrink = choose_shrink([group.cuts for group in groups], pixels_per_pixel)
    if any(group.interpolation == "area" for group in groups):
        shrink = 1  # its steps fall elsewhere in a smaller image, which shows
    small = groups
    if shrink > 1:
        boxes = [snap(group.cuts.boxes, shrink, image.width, image.height) for group in groups]
        small = _moved(groups, boxes)
        groups = _moved(groups, [shrink * some for some in boxes])
    for group, place in zip(groups, places, strict=True):
        place[:] = group.cuts.relative
    needed = hull(np.concatenate([group.cuts.boxes for group in groups]))
    return Cutting(image, shrink, groups, small, Box(*needed))


def _moved(groups: Sequence[Views], boxes: Sequence[np.ndarray]) -> list[Views]:
    return [
        group._replace(cuts=group.cuts._replace(boxes=some))
        for group, some in zip(groups, boxes, strict=True)
    ]


def write_views(cutting: Cutting, laps: Laps) -> None:
    """Decode an image once and write all its views.

    Raises:
        DecodeError: the image is cut off or damaged.
    """
    picture, found, start = cutting.image.decode(cutting.shrink, cutting.needed)
    laps.lap("decode")
    groups = cutting.small if found == cutting.shrink else cutting.groups
    cut_views(picture, groups, (start[0] // found, start[1] // found))
    laps.lap("resize")
    laps.num_images += 1
