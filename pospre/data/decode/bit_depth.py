"""Images of more than 8 bits per value: which of their values become 0 and 255.

``LOW,HIGH`` is a statement about the instrument (Hounsfield units, reflectances): the same value
becomes the same grey in every image. Without it (``auto``) the range is a function of the one
image: from 0, or from −HIGH where a value is negative, to HIGH, which is

- what the file says itself: TIFFs of 9 to 15 bits, and 65536 of 16-bit PGM and JPEG 2000, which
  Pillow brings to 16 bits; otherwise, a guess,
- the smallest power of four that no magnitude in the image exceeds: of whole numbers 256, 1024,
  4096, 16384, 65536 … (8, 10, 12, 14, 16 bits), of others 1, 4, 16 … NaN counts as 0.

Powers of four are far enough apart that images of one instrument mostly get the same range. They
are near enough that at least a quarter of the levels is used. The range is divided into 256 equal
parts. Pillow reads colour images of 16 bits with their upper 8 bits, for any range.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from pospre.errors import UserError

_LEVELS = 256
_SIXTEEN_BITS = 1 << 16
_AT_ONCE = 1 << 20  # values
_SCALED = ("PPM", "JPEG2000")  # to 16 bits, by Pillow
_BITS_PER_SAMPLE = 258  # a TIFF tag
_HUGE = 2.0**1000  # float64 ends soon after


class DeepRange(NamedTuple):
    """The values that are spread over 0 to 255.

    Attributes:
        low: this value and lower ones become 0.
        high: this value and higher ones become 255.
        guessed: whether the range comes from the image's largest value, not from the user or the
            file.
    """

    low: float
    high: float
    guessed: bool = False

    def __str__(self) -> str:
        return f"{self.low:.15g}..{self.high:.15g}"


class Decoding(NamedTuple):
    """How images are decoded.

    Attributes:
        channels: 3 turns every image into RGB, 1 into grey. For any other number, an image must
            have as many bands, which are not changed.
        deep_range: values that become 0 and 255 if an image has more than 8 bits. None: a function
            of the image, see above.
    """

    channels: int = 3
    deep_range: DeepRange | None = None


RGB = Decoding()


def check_range(low: float, high: float, key: str) -> DeepRange:
    """Return the range given for ``key``; raise ``UserError`` if it is empty or infinite."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{key} is {low:.15g},{high:.15g}; give two numbers, LOW below HIGH.")
    return DeepRange(low, high)


def parse_range(text: str, key: str) -> DeepRange | None:
    """Return the range of ``auto`` (None) or ``LOW,HIGH``; raise ``UserError`` for other texts."""
    if text == "auto":
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{key} is '{text}'; give auto, or LOW,HIGH such as 0,4096.") from None
    return check_range(low, high, key)


def given_range(value: str | tuple[float, float]) -> DeepRange | None:
    """Return the value of a recipe's ``data.deep_range``: ``"auto"`` (None) or two numbers."""
    return None if isinstance(value, str) else check_range(*value, "data.deep_range")


def said_range(image: Image.Image) -> DeepRange | None:
    """Return the value range that a file itself states; call it before its pixels are loaded."""
    if image.format in _SCALED and image.mode.startswith("I"):
        return DeepRange(0, _SIXTEEN_BITS)
    if _tiles(image) and image.mode in ("RGB", "RGBA", "CMYK") and ";16" in _raw_mode(image):
        return DeepRange(0, _SIXTEEN_BITS)
    if image.format == "TIFF" and image.mode == "I;16":
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]
        return DeepRange(0, 1 << bits) if bits < 16 else None
    return None


def in_eight_bits(
    image: Image.Image, said: DeepRange | None, wanted: DeepRange | None
) -> tuple[Image.Image, DeepRange | None]:
    """Return an image of 8 bits per value, and the range that became 0 to 255.

    Images of 8 bits or less are not changed; their range is None. ``said`` is what ``said_range``
    found, ``wanted`` the user's range.
    """
    if image.mode[0] not in "IF":
        return image, said
    levels, used = to_levels(np.asarray(image), wanted or said)
    return Image.fromarray(levels), used


def to_levels(values: np.ndarray, wanted: DeepRange | None) -> tuple[np.ndarray, DeepRange | None]:
    """Return values of any type as uint8 of the same shape, and the range that became 0 to 255.

    uint8 stays as it is. Truth values become 0 and 255. For both the range is None.
    """
    if values.dtype == np.uint8:
        return values, None
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(_LEVELS - 1), None
    used = wanted or _guess(values)
    levels = np.empty(values.shape, np.uint8)
    rows = max(1, _AT_ONCE * len(values) // max(1, values.size))
    for first in range(0, len(values), rows):  # in double precision whole slides would fill memory
        part = np.nan_to_num(values[first : first + rows], nan=0.0, posinf=np.inf, neginf=-np.inf)
        scaled = (part.astype(np.float64) - used.low) * (_LEVELS / (used.high - used.low))
        levels[first : first + rows] = np.clip(scaled, 0, _LEVELS - 1)
    return levels, used


def _guess(values: np.ndarray) -> DeepRange:
    """Return the range of the smallest power of four that holds all finite magnitudes."""
    is_whole = values.dtype.kind in "iu"
    finite = values if is_whole else values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    # 4096 itself is the 4097th whole number, but white where values are fractions
    most = max(high + 1, -low) if is_whole else max(high, -low)
    top = 256.0 if is_whole else 1.0
    while top < most and top < _HUGE:
        top *= 4
    is_sure = is_whole and low >= 0 and top == 256.0**values.dtype.itemsize
    return DeepRange(-top if low < 0 else 0.0, top, guessed=not is_sure)


def _tiles(image: Image.Image) -> Any:
    return getattr(image, "tile", None)  # images that come from no file have none


def _raw_mode(image: Image.Image) -> str:
    """Return Pillow's name for the values in the file."""
    arguments = _tiles(image)[0][3]
    return arguments if isinstance(arguments, str) else str(arguments[0] if arguments else "")
