"""What to cut out of an image: crop boxes and flips, pure functions of the sample and its size.

Random boxes follow the distribution of torchvision's ``RandomResizedCrop`` (ten tries, then a
central fallback), in whole pixels of the upright image. The draws come from ``pospre.draws`` with
the purposes ``"crop"`` and ``"flip"``; views are numbered through all groups of a loader.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pospre import draws
from pospre.data.augment import Augment
from pospre.errors import UserError, suggestion

INTERPOLATIONS = ("bicubic", "bilinear")
CROPS = ("random", "center")

_NUM_TRIES = 10
_DRAWS_PER_TRY = 4  # area, aspect ratio, left, top
_CENTER_RATIO = 224 / 256  # of the short side, as in "resize to 256, take the central 224"


@dataclass(frozen=True)
class ViewGroup:
    """Views of one kind that a loader cuts out of every image.

    Attributes:
        name: prefix of the batch keys.
        count: views per image.
        size: side of the square view in pixels.
        scale: range of the box area as a fraction of the image area.
        ratio: range of the box's width / height.
        flip_rate: probability that a view is mirrored.
        interpolation: ``"bicubic"`` or ``"bilinear"``, both with antialiasing when shrinking.
        crop: ``"random"``, or ``"center"`` for evaluation: the central square with 224/256 of the
            image's short side, never flipped (the field of view of resize to 256, centre crop 224).
        augment: what may change the views' colours in training, on the device.
    """

    name: str = "view"
    count: int = 1
    size: int = 224
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_rate: float = 0.5
    interpolation: str = "bicubic"
    crop: str = "random"
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        where = f"view group '{self.name}'"
        for key, value in (("count", self.count), ("size", self.size)):
            if value < 1:
                raise UserError(f"{where}: {key} is {value}; it must be at least 1.")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UserError(
                f"{where}: scale is {list(self.scale)}; give two fractions of the image area, "
                "0 < low <= high <= 1."
            )
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UserError(
                f"{where}: ratio is {list(self.ratio)}; give two width/height ratios, "
                "0 < low <= high."
            )
        if not 0 <= self.flip_rate <= 1:
            raise UserError(f"{where}: flip_rate is {self.flip_rate}; give a rate from 0 to 1.")
        for key, name, known in (
            ("interpolation", self.interpolation, INTERPOLATIONS),
            ("crop", self.crop, CROPS),
        ):
            if name not in known:
                hint = suggestion(name, known)
                raise UserError(f"{where}: {key} '{name}' is unknown.{hint}")
        try:
            self.augment.check_views(self.count, (self.size, self.size))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


class PixelBox(NamedTuple):
    """A crop in whole pixels of the upright image."""

    left: int
    top: int
    width: int
    height: int

    def relative(self, image_width: int, image_height: int) -> tuple[float, float, float, float]:
        """Return x0, y0, x1, y1 in [0, 1] of the image."""
        return (
            self.left / image_width,
            self.top / image_height,
            (self.left + self.width) / image_width,
            (self.top + self.height) / image_height,
        )


@dataclass(frozen=True)
class GroupPlan:
    """What is drawn for one view group before any image is seen.

    Attributes:
        group: the view group.
        crop_draws: float32 (B, V, 40) in [0, 1); empty for a centre crop.
        flips: bool (B, V).
    """

    group: ViewGroup
    crop_draws: np.ndarray
    flips: np.ndarray

    def box(self, sample: int, view: int, width: int, height: int) -> PixelBox:
        """Return the box of a view, given the size of the sample's upright image."""
        if self.group.crop == "center":
            return center_box(width, height)
        draw = self.crop_draws[sample, view].tolist()
        return random_box(draw, width, height, self.group.scale, self.group.ratio)


def first_view(views: Iterable[ViewGroup], name: str) -> int:
    """Return the number of a group's first view, as views are numbered through all groups."""
    first = 0
    for group in views:
        if group.name == name:
            break
        first += group.count
    return first


def plan_views(
    views: Sequence[ViewGroup], *, seed: int, epoch: int, index: np.ndarray
) -> list[GroupPlan]:
    """Draw boxes and flips for samples ``index`` (int64, (B,)), one plan per view group."""
    plans = []
    for group in views:
        first = first_view(views, group.name)
        numbers = range(first, first + group.count)
        if group.crop == "center":
            shape = (len(index), group.count)
            plans.append(GroupPlan(group, np.zeros((*shape, 0), np.float32), np.zeros(shape, bool)))
            continue
        crops = [
            draws.uniform(
                draws.sample_keys(seed, epoch, index, view, "crop"), _NUM_TRIES * _DRAWS_PER_TRY
            )
            for view in numbers
        ]
        flips = [
            draws.uniform(draws.sample_keys(seed, epoch, index, view, "flip"), 1)[:, 0]
            < group.flip_rate
            for view in numbers
        ]
        plans.append(GroupPlan(group, np.stack(crops, axis=1), np.stack(flips, axis=1)))
    return plans


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


def center_box(width: int, height: int) -> PixelBox:
    """Return the central square whose side is 224/256 of the short side."""
    side = max(1, round(min(width, height) * _CENTER_RATIO))
    return PixelBox((width - side) // 2, (height - side) // 2, side, side)


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
