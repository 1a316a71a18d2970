"""What may change a view group's pixels while training: rates and ranges, checked.

The device step in ``pospre.augment.device`` carries it out. Everything is off by default.
"""

import math
from dataclasses import dataclass, fields

from pospre.errors import UserError

Rate = float | tuple[float, ...]


@dataclass(frozen=True)
class RandAugment:
    """RandAugment as timm names it: ``rand-m9-mstd0.5-inc1``.

    Attributes:
        num_ops: operations drawn for a view; half of them are carried out.
        magnitude: their mean strength, of 10.
        magnitude_std: standard deviation of the strength.
        increasing: every operation gets stronger with the magnitude (``inc1``).
    """

    num_ops: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    increasing: bool = True

    def __post_init__(self) -> None:
        if self.num_ops < 1:
            raise _refusal("rand_augment.num_ops", self.num_ops, "give 1 or more.")
        if not 0 <= self.magnitude <= 10:
            raise _refusal("rand_augment.magnitude", self.magnitude, "give 0 to 10.")
        if not 0 <= self.magnitude_std < math.inf:
            raise _refusal("rand_augment.magnitude_std", self.magnitude_std, "give 0 or more.")


@dataclass(frozen=True)
class Augment:
    """What changes a view group's pixels, in the order of the attributes.

    A rate is a probability for every view of the group, or a list with one per view (DINOv2 blurs
    its second global view only).

    Attributes:
        rand_augment: RandAugment's options; None for none.
        jitter: strengths of brightness, contrast, saturation (factors from 1 − s to 1 + s) and hue
            (shifts from −s to s turns), applied in a random order; None for no jitter.
        jitter_rate: how often a view is jittered.
        grayscale_rate: how often it becomes grey.
        blur_rate: how often it is blurred by a Gaussian.
        blur_sigma: range of the Gaussian's standard deviation in pixels.
        blur_kernel: width of the Gaussian's window in pixels, odd. 9 is DINOv2's and makes of 2
            pixels' deviation 1.85; 17 cuts nothing off (LUT's code has no window).
        solarize_rate: how often values from the threshold on are inverted.
        solarize_threshold: that threshold, of 255.
        three_augment: exactly one of grey, solarised and blurred, each as often, instead of the
            three rates.
        erase_rate: how often a rectangle of 2 to 33 % becomes noise (random erasing, ``pixel``).
    """

    rand_augment: RandAugment | None = None
    jitter: tuple[float, float, float, float] | None = None
    jitter_rate: Rate = 0.8
    grayscale_rate: Rate = 0.0
    blur_rate: Rate = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_kernel: int = 9
    solarize_rate: Rate = 0.0
    solarize_threshold: int = 128
    three_augment: bool = False
    erase_rate: Rate = 0.0

    def __post_init__(self) -> None:
        for key in _RATES:
            value = getattr(self, key)
            if not all(0 <= rate <= 1 for rate in _each(value)):
                raise _refusal(key, value, "give rates from 0 to 1.")
        if self.jitter is not None:
            self._check_jitter(self.jitter)
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise _refusal("blur_sigma", self.blur_sigma, "give two widths, 0 < low <= high.")
        if self.blur_kernel < 1 or self.blur_kernel % 2 == 0:
            raise _refusal("blur_kernel", self.blur_kernel, "give an odd number of pixels.")
        if not 0 <= self.solarize_threshold <= 256:
            raise _refusal("solarize_threshold", self.solarize_threshold, "give 0 to 256.")
        if self.three_augment:
            for key in ("grayscale_rate", "blur_rate", "solarize_rate"):
                if any(_each(getattr(self, key))):
                    raise _refusal(
                        key,
                        getattr(self, key),
                        "three_augment sets it; leave it at 0, or turn three_augment off.",
                    )

    def _check_jitter(self, strengths: tuple[float, float, float, float]) -> None:
        if len(strengths) != 4 or min(strengths) < 0 or max(strengths) > 1 or strengths[3] > 0.5:
            raise _refusal(
                "jitter",
                strengths,
                "give [brightness, contrast, saturation, hue], from 0 to 1, hue to 0.5.",
            )

    @property
    def is_off(self) -> bool:
        """Whether views stay as they are."""
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
        """Raise ``UserError`` unless this suits ``count`` views of ``size`` (height, width)."""
        for key in _RATES:
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != count:
                raise _refusal(key, value, f"give one number, or {count}: one for each view.")
        if self.blurs and self.blur_kernel // 2 >= min(size):
            raise _refusal("blur_kernel", self.blur_kernel, f"views have {min(size)} pixels only.")

    def check_channels(self, group: str, channels: int) -> None:
        """Raise ``UserError`` if views of a group have other than three channels and need three."""
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


def per_view(rate: Rate, count: int) -> tuple[float, ...]:
    """Return one rate for each of ``count`` views."""
    return rate if isinstance(rate, tuple) else (rate,) * count


def _each(rate: Rate) -> tuple[float, ...]:
    return per_view(rate, 1)


def _refusal(key: str, value: object, remedy: str) -> UserError:
    shown = list(value) if isinstance(value, tuple) else value
    return UserError(f"augment.{key} is {shown}; {remedy}")


_RATES = tuple(field.name for field in fields(Augment) if field.name.endswith("_rate"))
