"""What to cut out of an image: places and flips, pure functions of the sample and its size.

The draws come from ``pospre.draws`` with the purposes ``"crop"`` and ``"flip"``; views are numbered
through all groups of a loader. ``pospre.data.crops`` makes places of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pospre import draws
from pospre.data.augment import Augment
from pospre.data.crops import (
    NUM_RANDOM_DRAWS,
    Cut,
    PixelBox,
    center_box,
    padded_cut,
    random_box,
    simple_cut,
    whole_cut,
)
from pospre.errors import UserError, suggestion

INTERPOLATIONS = ("bicubic", "bilinear")
_NUM_DRAWS = {"random": NUM_RANDOM_DRAWS, "center": 0, "full": 0, "simple": 2, "pad": 2}
CROPS = tuple(_NUM_DRAWS)


@dataclass(frozen=True)
class ViewGroup:
    """Views of one kind that a loader cuts out of every image.

    Attributes:
        name: prefix of the batch keys.
        count: views per image.
        size: of the view in pixels: the side of a square, or (height, width).
        scale: range of the box area as a fraction of the image area.
        ratio: range of the box's width / height.
        flip_rate: probability that a view is mirrored.
        interpolation: ``"bicubic"`` or ``"bilinear"``, both with antialiasing when shrinking.
        crop: ``"random"``; ``"center"`` for evaluation: the central square with 224/256 of the
            image's short side, never flipped (the field of view of resize to 256, centre crop 224);
            ``"full"``: the whole image, whatever its shape; ``"simple"``: DeiT III's simple resized
            crop; ``"pad"``: a random window of the whole image in a black frame of size/8, as usual
            for CIFAR. ``scale`` and ``ratio`` are for ``"random"`` only.
        augment: what may change the views' pixels in training, on the device.
    """

    name: str = "view"
    count: int = 1
    size: int | tuple[int, int] = 224
    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_rate: float = 0.5
    interpolation: str = "bicubic"
    crop: str = "random"
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        where = f"view group '{self.name}'"
        for key, value in (("count", self.count), ("size", min(self.shape))):
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
        if self.crop == "simple" and self.shape[0] != self.shape[1]:
            raise UserError(f"{where}: crop 'simple' cuts squares, but size is {self.size}.")
        try:
            self.augment.check_views(self.count, self.shape)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a view in pixels."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True)
class GroupPlan:
    """What is drawn for one view group before any image is seen.

    Attributes:
        group: the view group.
        crop_draws: float32 (B, V, draws that the crop needs) in [0, 1).
        flips: bool (B, V).
    """

    group: ViewGroup
    crop_draws: np.ndarray
    flips: np.ndarray

    def cut(self, sample: int, view: int, width: int, height: int) -> Cut:
        """Return where a view lies, given the size of the sample's upright image."""
        group, draw = self.group, self.crop_draws[sample, view].tolist()
        if group.crop == "simple":
            return simple_cut(draw, width, height, group.shape[0])
        if group.crop == "pad":
            return padded_cut(draw, width, height, group.shape)
        if group.crop == "center":
            box = center_box(width, height, group.shape)
        elif group.crop == "full":
            box = PixelBox(0, 0, width, height)
        else:
            box = random_box(draw, width, height, group.scale, group.ratio)
        return whole_cut(box, group.shape)


def first_view(views: Iterable[ViewGroup], name: str) -> int:
    """Return the number of a group's first view, as views are numbered through all groups."""
    first = 0
    for group in views:
        if group.name == name:
            break
        first += group.count
    return first


def plan_views(
    views: Sequence[ViewGroup], *, seed: int, epoch: int | np.ndarray, index: np.ndarray
) -> list[GroupPlan]:
    """Draw places and flips for samples ``index`` (int64, (B,)), one plan per view group.

    Args:
        views: all groups of the loader.
        seed: the run's seed.
        epoch: that the draws belong to: one for all samples, or int64 (B,).
        index: positions of the samples in the data set.
    """
    rows, epochs = index[:, None], np.broadcast_to(epoch, index.shape)[:, None]
    plans = []
    for group in views:
        numbers = np.arange(group.count) + first_view(views, group.name)
        crop_keys = draws.sample_keys(seed, epochs, rows, numbers, "crop")
        flip_keys = draws.sample_keys(seed, epochs, rows, numbers, "flip")
        flip_rate = 0.0 if group.crop == "center" else group.flip_rate
        flips = draws.uniform(flip_keys, 1)[..., 0] < flip_rate
        plans.append(GroupPlan(group, draws.uniform(crop_keys, _NUM_DRAWS[group.crop]), flips))
    return plans
