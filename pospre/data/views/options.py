"""Options of views: how they are cropped from each image, and how training changes their pixels.

Recipes and Python share these options. This module imports neither numpy nor PyTorch, so that
recipes are read quickly. ``pospre.data.views.crop_plan`` draws the crops, and
``pospre.augment.device`` changes the pixels; by default it changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Annotated, Literal, get_args

from pydantic import Field, FiniteFloat, PositiveInt, Strict

from pospre.arguments import check_fields
from pospre.errors import UserError, suggestion
from pospre.ranges import Pair, PositiveRange, Share, ShareRange, Size, only

Rate = Share | Annotated[tuple[Share, ...], Strict(False)]
Jitter = Annotated[
    tuple[float, float, float, float],
    Strict(False),
    only(
        lambda strengths: min(strengths) >= 0 and max(strengths) <= 1 and strengths[3] <= 0.5,
        "[brightness, contrast, saturation, hue], from 0 to 1, hue to 0.5",
    ),
]
Interpolation = Literal["bicubic", "bilinear", "area"]
Crop = Literal["random", "center", "full", "simple", "pad"]
INTERPOLATIONS, CROPS = get_args(Interpolation), get_args(Crop)
# ``boxes.exp`` is exact enough to 1000, and no image is as narrow
_Ratios = Annotated[
    Pair,
    only(
        lambda pair: 1 / 1000 <= pair[0] <= pair[1] <= 1000,
        "two ratios width/height with 0.001 <= low <= high <= 1000",
    ),
]
_Odd = Annotated[PositiveInt, only(lambda number: number % 2 == 1, "an odd number of pixels")]


@dataclass(frozen=True)
class RandAugment:
    """RandAugment as timm names it: ``rand-m9-mstd0.5-inc1``."""

    num_ops: PositiveInt = 2
    """Operations drawn for a view; half of them are carried out."""
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """Mean strength of the operations, of 10."""
    magnitude_std: Annotated[FiniteFloat, Field(ge=0)] = 0.5
    """Standard deviation of the strength."""
    increasing: bool = True
    """Every operation gets stronger with the magnitude (``inc1``)."""

    def __post_init__(self) -> None:
        check_fields(self, "rand_augment")


@dataclass(frozen=True)
class Augment:
    """Changes of a view group's pixels, in the order of the attributes.

    A rate is a probability for every view of the group, or a list with one per view (DINOv2 only
    blurs its second global view).
    """

    rand_augment: RandAugment | None = None
    """RandAugment's options; None: none."""
    jitter: Jitter | None = None
    """Strengths of brightness, contrast, saturation (factors from 1 − s to 1 + s) and hue (shifts
    from −s to s turns), applied in random order. None: no jitter.
    """
    jitter_rate: Rate = 0.8
    """Probability of jitter."""
    grayscale_rate: Rate = 0.0
    """Probability of grey."""
    blur_rate: Rate = 0.0
    """Probability of Gaussian blur."""
    blur_sigma: PositiveRange = (0.1, 2.0)
    """Range of the Gaussian's standard deviation in pixels."""
    blur_kernel: _Odd = 9
    """Width of the Gaussian's window in pixels, odd. DINOv2 has 9, which turns a deviation of 2
    pixels into 1.85; 17 truncates nothing (LUT's code has no window).
    """
    solarize_rate: Rate = 0.0
    """Probability of inverting values from the threshold on."""
    solarize_threshold: Annotated[int, Field(ge=0, le=256)] = 128
    """Threshold of solarize_rate, of 255."""
    three_augment: bool = False
    """Exactly one of grey, solarised and blurred, equally often, instead of the three rates."""
    erase_rate: Rate = 0.0
    """Probability that a rectangle of 2 to 33 % becomes noise (random erasing, ``pixel``)."""

    def __post_init__(self) -> None:
        _make(self, "rand_augment", RandAugment)
        check_fields(self, "augment")
        for key in ("grayscale_rate", "blur_rate", "solarize_rate"):
            check_used(
                self, "augment.", key, not self.three_augment, "three_augment, which sets it"
            )

    @property
    def is_off(self) -> bool:
        """Whether views are not changed."""
        return self.rand_augment is None and not self.colours and not self.erases

    @property
    def colours(self) -> bool:
        """Whether any view may be jittered, grey, blurred or solarised."""
        return (
            (self.jitter is not None and any(_each(self.jitter_rate)))
            or self.greys
            or self.blurs
            or any(_each(self.solarize_rate))
        )

    @property
    def greys(self) -> bool:
        """Whether any view may become grey."""
        return self.three_augment or any(_each(self.grayscale_rate))

    @property
    def erases(self) -> bool:
        """Whether a part of any view may be erased."""
        return any(_each(self.erase_rate))

    @property
    def blurs(self) -> bool:
        """Whether any view may be blurred."""
        return self.three_augment or any(_each(self.blur_rate))

    def check_views(self, count: int, size: tuple[int, int]) -> None:
        """Raise ``UserError`` unless this fits ``count`` views of ``size`` (height, width)."""
        solarizes = self.three_augment or any(_each(self.solarize_rate))
        for key, used, reason in (
            ("jitter", any(_each(self.jitter_rate)), "jitter_rate = 0"),
            ("jitter_rate", self.jitter is not None, "jitter = None"),
            ("blur_sigma", self.blurs, "blur_rate = 0"),
            ("blur_kernel", self.blurs, "blur_rate = 0"),
            ("solarize_threshold", solarizes, "solarize_rate = 0"),
        ):
            check_used(self, "augment.", key, used, reason)
        for key in _RATES:
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != count:
                raise _refusal(key, value, f"give one number, or {count}: one for each view.")
        if self.blurs and self.blur_kernel // 2 >= min(size):
            raise _refusal("blur_kernel", self.blur_kernel, f"views have only {min(size)} pixels.")

    def check_channels(self, group: str, channels: int) -> None:
        """Raise ``UserError`` if views have other than three channels but an option needs three."""
        if channels == 3:
            return
        for key, is_on in (
            ("rand_augment", self.rand_augment is not None),
            ("jitter", self.jitter is not None),
            ("three_augment", self.three_augment),
            ("grayscale_rate", self.greys),
        ):
            if is_on:
                raise UserError(
                    f"data.views.{group}.augment.{key} is for red, green and blue, but "
                    f"encoder.channels = {channels}; leave it out. Crops, flips, blur_rate, "
                    "solarize_rate and erase_rate are for any channels."
                )


def _make(options: object, key: str, kind: Callable[..., object]) -> None:
    """Replace a mapping, which a recipe has, by the options of this kind."""
    given = getattr(options, key)
    if isinstance(given, Mapping):
        known = [*signature(kind).parameters]
        for name in given:
            if name not in known:
                raise UserError(f"unknown key '{key}.{name}'.{suggestion(name, known)}")
        values = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        object.__setattr__(options, key, kind(**values))  # they are frozen


def check_used(options: object, where: str, key: str, used: bool, reason: str) -> None:
    """Raise ``UserError`` if an option is set, but has no effect; ``where`` goes before it."""
    value = getattr(options, key)
    if not used and value != getattr(type(options), key):
        shown = list(value) if isinstance(value, tuple) else value
        raise UserError(
            f"{where}{key} = {shown} has no effect with {reason}. Remove it, or change the latter."
        )


def per_view(rate: Rate, count: int) -> tuple[float, ...]:
    """Return one rate for each of ``count`` views."""
    return rate if isinstance(rate, tuple) else (rate,) * count


def _each(rate: Rate) -> tuple[float, ...]:
    return per_view(rate, 1)


def _refusal(key: str, value: object, remedy: str) -> UserError:
    shown = list(value) if isinstance(value, tuple) else value
    return UserError(f"augment.{key} is {shown}; {remedy}")


_RATES = tuple(field.name for field in fields(Augment) if field.name.endswith("_rate"))


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
    augment: Augment = Augment()
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
            _make(self, "augment", Augment)
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
