"""What may change the colours of a view group's views while training: rates and ranges, checked.

The device step in ``pospre.pretrain.augment`` carries it out. Everything is off by default.
"""

from dataclasses import dataclass, fields

from pospre.errors import UserError

Rate = float | tuple[float, ...]


@dataclass(frozen=True)
class Augment:
    """Colour augmentation of a view group, in the order of the attributes.

    A rate is a probability for every view of the group, or a list with one per view (DINOv2 blurs
    its second global view only).

    Attributes:
        jitter: strengths of brightness, contrast, saturation (factors from 1 − s to 1 + s) and hue
            (shifts from −s to s turns), applied in a random order; None for no jitter.
        jitter_rate: how often a view is jittered.
        grey_rate: how often it becomes grey.
        blur_rate: how often it is blurred by a Gaussian.
        blur_sigma: range of the Gaussian's standard deviation in pixels.
        blur_kernel: width of the Gaussian's window in pixels, odd.
        solarise_rate: how often values from the threshold on are inverted.
        solarise_threshold: that threshold, of 255.
        three_augment: exactly one of grey, solarised and blurred, each as often, instead of the
            three rates.
    """

    jitter: tuple[float, float, float, float] | None = None
    jitter_rate: Rate = 0.8
    grey_rate: Rate = 0.0
    blur_rate: Rate = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_kernel: int = 9
    solarise_rate: Rate = 0.0
    solarise_threshold: int = 128
    three_augment: bool = False

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
        if not 0 <= self.solarise_threshold <= 256:
            raise _refusal("solarise_threshold", self.solarise_threshold, "give 0 to 256.")
        if self.three_augment:
            for key in ("grey_rate", "blur_rate", "solarise_rate"):
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
        return not (
            (self.jitter and any(_each(self.jitter_rate)))
            or self.three_augment
            or any(_each(self.grey_rate))
            or self.blurs
            or any(_each(self.solarise_rate))
        )

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


def per_view(rate: Rate, count: int) -> tuple[float, ...]:
    """Return one rate for each of ``count`` views."""
    return rate if isinstance(rate, tuple) else (rate,) * count


def _each(rate: Rate) -> tuple[float, ...]:
    return per_view(rate, 1)


def _refusal(key: str, value: object, remedy: str) -> UserError:
    shown = list(value) if isinstance(value, tuple) else value
    return UserError(f"augment.{key} is {shown}; {remedy}")


_RATES = tuple(field.name for field in fields(Augment) if field.name.endswith("_rate"))
