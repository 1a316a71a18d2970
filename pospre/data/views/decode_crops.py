"""Decode once, crop many: from one opened image to all views of a sample.

A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if views differ by less than the tolerance, on
average over photographs. This depends only on the positions of the views and the image's size.
Boxes are then moved to whole pixels of the smaller image, even if the file cannot be decoded at
that size. So a sample has the same boxes in every storage format.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pospre.data.decode.decoder import OpenedImage
from pospre.data.decode.jpeg import SHRINKS, Box
from pospre.data.timing import Stopwatch
from pospre.data.views.boxes import Crops, hull
from pospre.data.views.resize import Views, resize_crops

# Error of views (RMS in grey levels of 255, mean over photographs) if images are decoded so small
# that they have this many pixels per view pixel (``test_crop`` measures it).
_OVERSAMPLING = ((3.6, 1.25), (2.6, 1.5), (2.0, 2.0), (1.1, 2.5), (0.9, 3.0), (0.75, 4.0))


def least_oversampling(tolerance: float) -> float:
    """Return the decoded pixels per view pixel that the tolerance requires, or infinity."""
    return next((pixels for error, pixels in _OVERSAMPLING if error <= tolerance), float("inf"))


def choose_shrink(groups: Sequence[Crops], oversampling: float) -> int:
    """Return the factor by which an image may be shrunk in decoding: 8, 4, 2 or 1."""
    least = min(float((crops.boxes[:, 2:] / crops.scaled).min()) for crops in groups)
    return next((shrink for shrink in SHRINKS if least >= shrink * oversampling), 1)


def snap(boxes: np.ndarray, shrink: int, width: int, height: int) -> np.ndarray:
    """Move boxes (V, 4) to whole pixels of an image ``shrink`` times smaller, in these pixels.

    If a box is the whole image, up to ``shrink`` − 1 lines are dropped at the far sides.
    """
    sides = np.array([width // shrink, height // shrink])
    wanted = np.rint(boxes / shrink).astype(np.int64)
    lengths = np.minimum(np.maximum(wanted[:, 2:], 1), sides)
    return np.hstack([np.minimum(wanted[:, :2], sides - lengths), lengths])


def pushed_into(boxes: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Return boxes (V, 4) moved and cut as little as possible to lie inside others."""
    lengths = np.minimum(boxes[:, 2:], outer[:, 2:])
    last = outer[:, :2] + outer[:, 2:] - lengths
    return np.hstack([np.clip(boxes[:, :2], outer[:, :2], last), lengths])


def _snapped(crops: Crops, shrink: int) -> np.ndarray:
    """Return the boxes of views in the smaller image; views inside others stay inside."""
    boxes = snap(crops.boxes, shrink, *crops.image)
    if crops.within is None:
        return boxes
    return pushed_into(boxes, snap(crops.within, shrink, *crops.image))


class DecodePlan(NamedTuple):
    """All views of one opened image, before it is decoded.

    Attributes:
        shrink: factor by which it may be shrunk in decoding.
        groups: its views, in the full-size image.
        small: its views, in the smaller image.
        needed: the part of the full-size image that contains all of them.
    """

    image: OpenedImage
    shrink: int
    groups: Sequence[Views]
    small: Sequence[Views]
    needed: Box


def plan_decoding(
    image: OpenedImage, groups: Sequence[Views], places: Sequence[np.ndarray], oversampling: float
) -> DecodePlan:
    """Choose how an image is decoded, and write the positions of its views.

    ``groups`` are its views in the full-size image, and ``places`` the output: each group's views
    as fractions of the image, float32 (V, 4). For ``oversampling`` see ``least_oversampling``.
    """
    shrink = choose_shrink([group.crops for group in groups], oversampling)
    if any(group.interpolation == "area" for group in groups):
        shrink = 1  # its steps are at other places in a smaller image, which is visible
    small = groups
    if shrink > 1:
        boxes = [_snapped(group.crops, shrink) for group in groups]
        small = _moved(groups, boxes)
        groups = _moved(groups, [shrink * some for some in boxes])
    for group, place in zip(groups, places, strict=True):
        place[:] = group.crops.relative
    needed = hull(np.concatenate([group.crops.boxes for group in groups]))
    return DecodePlan(image, shrink, groups, small, Box(*needed))


def _moved(groups: Sequence[Views], boxes: Sequence[np.ndarray]) -> list[Views]:
    return [
        group._replace(crops=group.crops._replace(boxes=some))
        for group, some in zip(groups, boxes, strict=True)
    ]


def write_views(plan: DecodePlan, watch: Stopwatch) -> None:
    """Decode an image once and write all its views; ``DecodeError`` if it is damaged."""
    picture, found, start = plan.image.decode(plan.shrink, plan.needed)
    watch.lap("decode")
    groups = plan.small if found == plan.shrink else plan.groups
    resize_crops(picture, groups, (start[0] // found, start[1] // found))
    watch.lap("resize")
    watch.num_images += 1
