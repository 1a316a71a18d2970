"""How training changes the pixels of views, on the device: ``pospre.augment.device`` does it.

Recipes and Python share these options; by default nothing changes. This module imports neither
numpy nor PyTorch, so that recipes are read quickly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Annotated

from pydantic import Field, FiniteFloat, PositiveInt, Strict

from pospre.arguments import check_fields
from pospre.errors import UserError, suggestion
from pospre.ranges import PositiveRange, Share, only

Rate = Share | Annotated[tuple[Share, ...], Strict(False)]
Jitter = Annotated[
    tuple[float, float, float, float],
    Strict(False),
    only(
        lambda strengths: min(strengths) >= 0 and max(strengths) <= 1 and strengths[3] <= 0.5,
        "[brightness, contrast, saturation, hue], from 0 to 1, hue to 0.5",
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
        take_options(self, "rand_augment", RandAugment)
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


def take_options(options: object, key: str, kind: Callable[..., object]) -> None:
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
