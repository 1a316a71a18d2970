"""How large a data set's images are, and how large its views need them."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from pospre.data.decode.decoder import DecodeError, OpenedImage
from pospre.data.stores.reader import DamagedSample, Reader
from pospre.data.views.options import ViewGroup

_LOOKED_AT = 64  # samples that stand for all
_MOST = 0.95  # of the images have all detail at the side that is recommended
_JPEG = b"\xff\xd8\xff"
_CENTER = 256 / 224  # what of the short side the crop "center" takes, the other way round


@dataclass(frozen=True)
class ImageSizes:
    """What some images of a data set say about all of them.

    Attributes:
        pixels: of an image in full size, mean.
        pixels_needed: likewise, were it stored at ``max_side``.
        max_side: longer side at which the views keep all detail.
        bits_per_pixel: encoded.
        other_than_jpeg: share of encoded images that are no JPEGs.
        is_raw: whether pixels are stored.
        unreadable: how many are no images.
        looked_at: how many were looked at.
        has_bands: whether they have as many channels as no JPEG has.
    """

    pixels: float
    pixels_needed: float
    max_side: int
    bits_per_pixel: float
    other_than_jpeg: float
    is_raw: bool
    unreadable: int
    looked_at: int
    has_bands: bool = False


def look_at_sizes(reader: Reader, views: Sequence[ViewGroup]) -> ImageSizes | None:
    """Read the headers of some images; None where there are none."""
    if reader.features is not None:
        return None
    places = np.linspace(0, len(reader) - 1, min(_LOOKED_AT, len(reader))).astype(np.int64)
    sides, num_bytes, num_jpegs, is_raw = [], 0, 0, False
    reader.expect(places)  # remote samples come only when they are expected
    with closing(reader):
        for index in places.tolist():
            try:
                encoded = reader.read(index).encoded
                image = OpenedImage(encoded, reader.decoding)
            except (DecodeError, DamagedSample):
                continue
            is_raw = encoded.ndim == 3
            num_bytes += encoded.nbytes
            num_jpegs += encoded[:3].numpy().tobytes() == _JPEG
            sides.append((image.width, image.height))
    if not sides:
        return None
    side, needed = _max_side(np.array(sides, float), views)
    pixels = np.prod(sides, axis=1)
    return ImageSizes(
        pixels=float(pixels.mean()),
        pixels_needed=needed,
        max_side=side,
        bits_per_pixel=float(8 * num_bytes / pixels.sum()),
        other_than_jpeg=0.0 if is_raw else 1 - num_jpegs / len(sides),
        is_raw=is_raw,
        unreadable=len(places) - len(sides),
        looked_at=len(places),
        has_bands=reader.decoding.channels not in (1, 3),
    )


def _max_side(sides_N2: np.ndarray, views: Sequence[ViewGroup]) -> tuple[int, float]:
    """Return the longer side that is enough for most images, and their mean pixels at it."""
    short, long = sides_N2.min(axis=1), sides_N2.max(axis=1)
    needed = np.max([shorter_side(group, long / short) for group in views], axis=0)
    side = int(-(-np.quantile(needed * long / short, _MOST) // 32) * 32)
    shrunk = np.minimum(1.0, side / long) ** 2
    return side, float((short * long * shrunk).mean())


def shorter_side(group: ViewGroup, stretch_N: np.ndarray) -> np.ndarray:
    """Return the shorter side at which every view of a group still shrinks what it shows.

    Args:
        group: the views.
        stretch_N: longer side / shorter side of the images.
    """
    height, width = group.shape
    if group.crop == "random":  # the smallest box, of the view's shape
        return np.sqrt(height * width / group.scale[0] / stretch_N)
    if group.crop == "center":
        return np.full_like(stretch_N, max(height, width) * _CENTER)
    return np.full_like(stretch_N, max(height, width))  # of all the image
