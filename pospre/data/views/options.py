"""Options of views: how they are cropped from each image; ``crop_plan`` draws the crops.

Recipes and Python share these options. This module imports neither numpy nor PyTorch, so that
recipes are read quickly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pydantic import PositiveInt

from pospre.arguments import check_fields
from pospre.data.views.augment_options import Augment, check_used, take_options
from pospre.errors import UserError
from pospre.ranges import Pair, Share, ShareRange, Size, only

Interpolation = Literal["bicubic", "bilinear", "area"]
Crop = Literal["random", "center", "full", "simple", "pad"]
_UNCHANGED = Augment()
INTERPOLATIONS, CROPS = get_args(Interpolation), get_args(Crop)
# ``boxes.exp`` is exact enough to 1000, and no image is as narrow
_Ratios = Annotated[
    Pair,
    only(
        lambda pair: 1 / 1000 <= pair[0] <= pair[1] <= 1000,
        "two ratios width/height with 0.001 <= low <= high <= 1000",
    ),
]


@dataclass(frozen=True)
class _Named:
    name: str = "view"


@dataclass(frozen=True)
class ViewOptions:
    """Options of one kind of views."""

    count: PositiveInt = 1
    """Views per image."""
    size: Size | None = None
    """Side of the view in pixels, or (height, width); None: 224, in recipes the encoder's."""
    scale: ShareRange = (0.2, 1.0)
    """Range of the box area as a fraction of the image area."""
    ratio: _Ratios = (3 / 4, 4 / 3)
    """Range of the box's width / height."""
    flip_rate: Share = 0.5
    """Probability that a view is mirrored."""
    interpolation: Interpolation = "bicubic"
    """``bicubic`` or ``bilinear``, with antialiasing when shrinking; ``area``: the mean of the
    pixels under each new one.
    """
    crop: Crop = "random"
    """``random``; ``center``, for evaluation: the short side resized to 256/224 of the view's, then
    its middle (256 and 224 as published), never flipped; ``full``: the whole image, of any shape;
    ``simple``: DeiT III's simple resized crop; ``pad``: a random window of the whole image in a
    black frame of size/8, as usual for CIFAR. ``scale`` and ``ratio`` are for ``random`` only.
    """
    augment: Augment = _UNCHANGED
    """Changes of the views' pixels in training, on the device; also as a mapping."""
    inside: str | None = None
    """Another group, whose view these are cropped from. ``scale`` and ``ratio`` then refer to its
    box rather than the image. It must have random crops or whole images, and one view, or as many
    as this group.
    """
    of: str | None = None
    """Another group, whose views these are in another size: the same boxes and flips, read from the
    image at this ``size``. A reference sees them in place of that group. Beside it only ``size``
    and ``interpolation`` may be given.
    """


@dataclass(frozen=True)
class ViewGroup(ViewOptions, _Named):
    """A loader's group of views: ``ViewOptions`` and a name, which is the prefix of batch keys."""

    def __post_init__(self) -> None:
        where = f"view group '{self.name}'"
        try:
            take_options(self, "augment", Augment)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        check_fields(self, where)
        if self.crop == "simple" and self.shape[0] != self.shape[1]:
            raise UserError(f"{where}: crop 'simple' cuts squares, but size is {self.size}.")
        if self.inside is not None and self.crop != "random":
            raise UserError(
                f"{where}: inside = {self.inside} needs crop = random, not {self.crop}. Remove one "
                "of the two."
            )
        for key, used in (
            ("scale", self.crop == "random"),
            ("ratio", self.crop == "random"),
            ("flip_rate", self.crop != "center" or not self.flip_rate),
        ):
            check_used(self, f"{where}: ", key, used, f"crop = {self.crop}")
        for key in ("scale", "ratio", "flip_rate", "crop", "augment", "inside"):
            check_used(self, f"{where}: ", key, self.of is None, f"of = {self.of}")
        try:
            self.augment.check_views(self.count, self.shape)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of a view in pixels."""
        size = 224 if self.size is None else self.size
        return (size, size) if isinstance(size, int) else size


Views = ViewGroup | Mapping[str, ViewGroup] | Sequence[ViewGroup]
"""One view group, or several as a sequence or by name."""


def named_groups(views: Views) -> dict[str, ViewGroup]:
    """Return view groups by name; ``UserError`` if there are none, or two of one name."""
    if isinstance(views, Mapping):
        named = {name: replace(group, name=name) for name, group in views.items()}
    else:
        views = [views] if isinstance(views, ViewGroup) else views
        named = {group.name: group for group in views}
    if len(named) != len(views) or not named:
        raise UserError(
            "give one or more view groups, each with its own name, ViewGroup(name=…), not "
            f"{', '.join(named) or 'none'} ({len(views)} in all)."
        )
    for group in named.values():
        _check_inside(group, named)
    return {name: _like_its_source(group, named) for name, group in named.items()}


def _like_its_source(group: ViewGroup, named: Mapping[str, ViewGroup]) -> ViewGroup:
    """Return a group that is ``of`` another with as many views; others stay as they are."""
    if group.of is None:
        return group
    where = f"data.views.{group.name}.of = {group.of}"
    source = named.get(group.of)
    if source is None or source.of is not None:
        others = [name for name, each in named.items() if each.of is None]
        raise UserError(f"{where}, but groups with crops of their own are: {', '.join(others)}.")
    if source.crop not in ("random", "full"):
        raise UserError(
            f"{where}, but data.views.{source.name}.crop = {source.crop}, which cuts from a "
            "resized image. Use random or full."
        )
    (high, wide), (rows, columns) = group.shape, source.shape
    if high * columns != wide * rows:
        raise UserError(
            f"{where}, but its size {[high, wide]} has another shape than {[rows, columns]}; "
            "multiply both sides by the same factor."
        )
    if group.count not in (1, source.count):
        raise UserError(f"{where} has {source.count} views; leave out count = {group.count}.")
    return replace(group, count=source.count)


def _check_inside(group: ViewGroup, named: Mapping[str, ViewGroup]) -> None:
    """Raise ``UserError`` unless the group's outer views, if any, are suitable."""
    if group.inside is None:
        return
    where = f"data.views.{group.name}.inside = {group.inside}"
    outer = named.get(group.inside)
    if outer is None:
        others = ", ".join(name for name in named if name != group.name) or "no other"
        raise UserError(f"{where}, but the other view groups are: {others}.")
    if outer.inside is not None:
        raise UserError(
            f"{where}, which is itself inside {outer.inside}. Give a group that is cropped from "
            "the whole image."
        )
    if outer.crop not in ("random", "full"):
        raise UserError(
            f"{where}, but data.views.{outer.name}.crop = {outer.crop}, whose views may reach over "
            "the image's edge. Use random or full."
        )
    if outer.count not in (1, group.count):
        raise UserError(
            f"{where}, but data.views.{outer.name}.count = {outer.count} and "
            f"data.views.{group.name}.count = {group.count}. Use equal counts, so that each view "
            "has its own, or 1."
        )
