"""JPEGs: their size before they are decoded, and no more decoding than the views need.

libjpeg-turbo decodes at 1/2, 1/4 and 1/8 of the size for less than the full price, and rows below
the lowest view need not be decoded at all. Most of a JPEG's cost is undoing its entropy coding, in
the order of the rows, so leaving rows out at the bottom pays; at the top it would not.
"""

from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

SHRINKS = (8, 4, 2)  # denominators that libjpeg-turbo has fast code for
_START = b"\xff\xd8\xff"
_EXIF_TAG, _UPRIGHT = 0x0112, 1
_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive: what libjpeg-turbo reads
_BASELINE = 0xC0
_APP1, _SCAN, _END = 0xE1, 0xDA, 0xD9
_MARGIN_ROWS = 16  # below the last one wanted: colour is interpolated between rows
_FEWER_ROWS = 0.95  # of the rows: only then leaving some out is worth a copy of the bytes
# libjpeg says this of the rows that it was not asked for, and of harmless bytes between segments.
_HARMLESS = "extraneous bytes before marker"
_DAMAGE = ("Corrupt JPEG data", "Premature end")


class JpegError(Exception):
    """The bytes are cut off or damaged; the message is libjpeg-turbo's."""


class UnusualJpeg(Exception):
    """A JPEG of a kind that is left to Pillow, such as CMYK."""


class JpegHeader(NamedTuple):
    """What a JPEG says about itself.

    Attributes:
        width: of the stored pixels, before they are turned upright.
        height: likewise.
        orientation: of EXIF; 1 is upright.
        height_at: offset of the two bytes that hold the height; 0 where the height must be kept,
            as the rows do not lie in the file one after the other.
    """

    width: int
    height: int
    orientation: int
    height_at: int


def read_header(data: memoryview) -> JpegHeader:
    """Read the segments of a JPEG up to its first scan.

    Raises:
        UnusualJpeg: it is no JPEG, or of a kind that is not read here.
    """
    if bytes(data[:3]) != _START:
        raise UnusualJpeg
    frame, orientation, at = None, _UPRIGHT, 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            break
        marker = data[at + 1]
        if marker == 0xFF:  # a filler
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if marker in _FRAMES and at + 10 <= len(data):
            frame = (at, marker)
        elif marker == _APP1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            orientation = _read_orientation(bytes(data[at + 4 : at + 2 + length]))
        elif marker == _SCAN and frame is not None:
            return _header(data, *frame, orientation, scan=at)
        elif marker in (_SCAN, _END):
            break
        at += 2 + length
    raise UnusualJpeg


def decode(
    data: np.ndarray, header: JpegHeader, shrink: int, num_rows: int, buffer: np.ndarray
) -> np.ndarray:
    """Decode to RGB at 1/``shrink`` of the size: uint8 (rows, columns, 3), not turned upright.

    Args:
        data: the file's bytes, uint8 (N,).
        header: of this JPEG.
        shrink: 1, 2, 4 or 8; sides are rounded up.
        num_rows: rows of the full size that are wanted; at least so many are decoded.
        buffer: room for the pixels, uint8, at least ``num_pixels(header, shrink)`` long; what is
            returned lies in it.

    Raises:
        JpegError: cut off or damaged.
        UnusualJpeg: libjpeg-turbo does not make RGB of it.
    """
    height = header.height
    if header.height_at and num_rows + _MARGIN_ROWS < _FEWER_ROWS * height:
        height = num_rows + _MARGIN_ROWS
        data = data.copy()
        data[header.height_at : header.height_at + 2] = (height >> 8, height & 0xFF)
    shape = (-(-height // shrink), -(-header.width // shrink), 3)
    options = {} if shrink == 1 else {"min_height": shape[0], "min_width": shape[1]}
    try:
        simplejpeg.decode_jpeg(
            data, "RGB", min_factor=float(shrink), buffer=buffer, strict=True, **options
        )
    except ValueError as error:
        text = str(error)
        if _HARMLESS not in text:
            if any(known in text for known in _DAMAGE):
                raise JpegError(text) from error
            raise UnusualJpeg from error
    pixels = buffer[: shape[0] * shape[1] * 3].reshape(shape)
    return pixels


def num_pixels(header: JpegHeader, shrink: int) -> int:
    """Return the bytes that the decoded pixels take at most."""
    return -(-header.width // shrink) * -(-header.height // shrink) * 3


def _header(data: memoryview, frame: int, marker: int, orientation: int, scan: int) -> JpegHeader:
    height, width = data[frame + 5] << 8 | data[frame + 6], data[frame + 7] << 8 | data[frame + 8]
    if height == 0 or width == 0:  # the height comes after the first scan: rare
        raise UnusualJpeg
    components, in_scan = data[frame + 9], data[scan + 4] if scan + 4 < len(data) else 0
    if components not in (1, 3):
        raise UnusualJpeg
    in_order = marker == _BASELINE and in_scan == components
    return JpegHeader(width, height, orientation, frame + 5 if in_order else 0)


def _read_orientation(segment: bytes) -> int:
    exif = Image.Exif()
    try:
        exif.load(segment)
        value = exif.get(_EXIF_TAG, _UPRIGHT)
    except Exception:  # Pillow raises nearly every kind on damaged metadata, which matter to no one
        return _UPRIGHT
    return value if value in range(1, 9) else _UPRIGHT
