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
from pospre.data.crops import Cuts
from pospre.data.decode import OpenedImage, cut_views
from pospre.data.jpeg import SHRINKS

# Error of views, RMS in grey levels of 255 and mean over photographs, where images were decoded so
# small that they still have this many pixels per view pixel (tests/data/test_cutting.py measures).
_PIXELS_PER_PIXEL = ((3.6, 1.25), (2.6, 1.5), (2.0, 2.0), (1.1, 2.5), (0.9, 3.0), (0.75, 4.0))


class Views(NamedTuple):
    """Where the views of one group of a sample lie, and where they go.

    Attributes:
        cuts: their places in the full-size image.
        pixels: of the views, uint8 (V, h, w, channels), to be written.
        boxes: float32 (V, 4), to be written.
        interpolation: of the view group.
    """

    cuts: Cuts
    pixels: np.ndarray
    boxes: np.ndarray
    interpolation: str


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


def write_views(
    image: OpenedImage, groups: Sequence[Views], pixels_per_pixel: float, laps: Laps
) -> None:
    """Decode an image once and write all its views and their boxes.

    Raises:
        DecodeError: the image is cut off or damaged.
    """
    shrink = choose_shrink([group.cuts for group in groups], pixels_per_pixel)
    if any(group.interpolation == "area" for group in groups):
        shrink = 1  # its steps fall elsewhere in a smaller image, which shows
    small = [group.cuts.boxes for group in groups]
    if shrink > 1:
        small = [snap(boxes, shrink, image.width, image.height) for boxes in small]
    boxes = [shrink * some for some in small]
    top = min(int(some[:, 1].min()) for some in boxes)
    bottom = max(int((some[:, 1] + some[:, 3]).max()) for some in boxes)
    laps.lap("plan")
    picture, found, first = image.decode(shrink, top, bottom)
    laps.lap("decode")
    for group, full, some in zip(groups, boxes, small, strict=True):
        group.boxes[:] = group.cuts._replace(boxes=full).relative
        decoded = (some if found == shrink else full) - (0, first // found, 0, 0)
        cut_views(picture, group.cuts._replace(boxes=decoded), group.pixels, group.interpolation)
    laps.lap("resize")
