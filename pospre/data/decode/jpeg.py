"""JPEGs: their size before they are decoded, and no more decoding than the views need.

libjpeg-turbo decodes at 1/2, 1/4 and 1/8 of the size for less than the full price, and rows below
the lowest view need not be decoded at all. Most of a JPEG's cost is undoing its entropy coding,
block after block, row after row. If restart markers divide the rows, blocks above and beside the
views can be left out too (``python -m data_prep.convert --seekable`` makes such files).
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from pospre.data.decode.restart_markers import crop_intervals

SHRINKS = (8, 4, 2)  # denominators that libjpeg-turbo has fast code for
_START = b"\xff\xd8\xff"
_ORIENTATION_TAG, UPRIGHT = 0x0112, 1
_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive: what libjpeg-turbo reads
_BASELINE = 0xC0
_APP1, _SCAN, _RESTART, _END, _INTERVAL = 0xE1, 0xDA, 0xD0, 0xD9, 0xDD
_MARGIN = 2  # pixels of the result on all sides of those wanted: colour is interpolated between
_FEWER = 0.95  # of the pixels: only then leaving some out is worth a copy of the bytes
# libjpeg reports this for rows that were not requested, for padding, and after errors
_LEFT_OVER = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0x(\w\w)")
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_DAMAGE = ("Corrupt JPEG data", "Premature end")


class JpegError(Exception):
    """The bytes are cut off or damaged; the message is libjpeg-turbo's."""


class UnusualJpeg(Exception):
    """A JPEG of a kind that Pillow must decode, such as CMYK."""


class Box(NamedTuple):
    """Part of an image in pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int


class JpegHeader(NamedTuple):
    """The header of a JPEG.

    Attributes:
        width: width of the stored pixels, before rotation to upright.
        orientation: see ``orientation_of``.
        height_at: offset of the two bytes that hold the height; 0 if the height must stay, because
            the rows do not follow one another in the file. The width is behind it.
        interval: width and height in pixels between two restart markers: whole rows, or one of
            equal parts of a row. 0 if it is neither, or without markers.
        scan: offset of the entropy-coded data.
    """

    width: int
    height: int
    orientation: int
    height_at: int
    interval: tuple[int, int] = (0, 0)
    scan: int = 0

    @property
    def upright_sides(self) -> tuple[int, int]:
        """Width and height of the upright image."""
        sides = self.width, self.height
        return sides[::-1] if self.orientation > 4 else sides

    @property
    def whole(self) -> Box:
        """All of the image."""
        return Box(0, 0, self.width, self.height)


def read_header(data: memoryview) -> JpegHeader:
    """Read a JPEG's segments up to its first scan; raise ``UnusualJpeg`` for other files."""
    frame, interval, metadata = None, 0, dict[str | tuple[int, int], Any]()
    for marker, at, segment in segments(data):
        if marker in _FRAMES and at + 10 <= len(data):
            frame = (at, marker)
        elif marker == _APP1 and segment[: len(_EXIF)] == _EXIF:
            before = metadata.get("exif")  # one that is too long for a segment continues in another
            metadata["exif"] = bytes(segment) if before is None else before + segment[len(_EXIF) :]
        elif marker == _APP1 and segment[: len(_XMP)] == _XMP:
            metadata["xmp"] = bytes(segment[len(_XMP) :])
        elif marker == _INTERVAL and at + 6 <= len(data):
            interval = data[at + 4] << 8 | data[at + 5]
        elif marker == _SCAN and frame is not None:
            return _header(data, *frame, _orientation(metadata), interval, scan=at)
    raise UnusualJpeg


def orientation_of(image: Image.Image) -> int:
    """Return an image's orientation from 1 (upright) to 8, as Pillow understands it.

    EXIF's tag decides. XMP's only counts if EXIF has none: programs that turn an image upright
    often correct only the first. Invalid values and broken metadata mean upright.
    """
    try:
        value = image.getexif().get(_ORIENTATION_TAG, UPRIGHT)
    except Exception:  # Pillow raises nearly every kind on broken metadata of good images
        return UPRIGHT
    return int(value) if value in range(1, 9) else UPRIGHT


def segments(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield marker, offset and content of a JPEG's segments, the first scan's header last.

    Other files have none. The content may be cut off.
    """
    at = 2 if bytes(data[:3]) == _START else len(data)
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a filler
            at += 1
            continue
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        yield marker, at, data[at + 4 : end]
        if marker == _SCAN or _RESTART <= marker <= _END:  # the last ones have no length
            break
        at = end


def decode(
    data: np.ndarray, header: JpegHeader, shrink: int, box: Box
) -> tuple[np.ndarray, tuple[int, int]]:
    """Decode to RGB at 1/``shrink`` of the size: uint8 (rows, columns, 3), not turned upright.

    ``box`` is the needed part, in pixels of the full size; the result may be larger. Sides are
    rounded up. Return the pixels, and the column and row of the full size that they begin with,
    multiples of ``shrink``.

    Raises:
        JpegError: cut off or damaged.
        UnusualJpeg: libjpeg-turbo cannot convert it to RGB.
    """
    whole, region = data, header.whole
    if header.height_at:
        data, region = _crop_file(data, header, _widen(box, header, _MARGIN * shrink))
    width, height = region.right - region.left, region.bottom - region.top
    shape = (-(-height // shrink), -(-width // shrink), 3)
    options = {} if shrink == 1 else {"min_height": shape[0], "min_width": shape[1]}
    buffer = np.empty(shape, np.uint8)  # filled also where libjpeg complains at the end
    try:
        pixels = simplejpeg.decode_jpeg(
            data, "RGB", min_factor=float(shrink), buffer=buffer, strict=True, **options
        )
        if pixels.shape != shape:
            raise UnusualJpeg
    except ValueError as error:
        text = str(error)
        if not any(known in text for known in _DAMAGE):
            raise UnusualJpeg from error
        left_over = _LEFT_OVER.match(text)
        # where only the height was changed the rest is left over; of whole intervals nothing is
        is_lower = data is not whole and not header.interval[0]
        if left_over is None or not (is_lower or _is_padding(data, *left_over.groups())):
            raise JpegError(text) from error
    return buffer, region[:2]


def _is_padding(data: np.ndarray, count: str, marker: str) -> bool:
    """Return whether libjpeg only reported zeros before the end, which some cameras write."""
    end = data.tobytes().rfind(b"\xff\xd9")
    return marker == "d9" and end > 0 and not data[max(0, end - int(count)) : end].any()


def _widen(box: Box, header: JpegHeader, margin: int) -> Box:
    """Return a box with a margin where the image has one, as decoding can cut it out."""
    left, top = max(0, box.left - margin), max(0, box.top - margin)
    right, bottom = min(header.width, box.right + margin), min(header.height, box.bottom + margin)
    width, height = header.interval
    if not width:
        return Box(0, 0, header.width, bottom)
    right = min(header.width, -(-right // width) * width)
    bottom = min(header.height, -(-bottom // height) * height)
    return Box(left // width * width, top // height * height, right, bottom)


def _crop_file(data: np.ndarray, header: JpegHeader, box: Box) -> tuple[np.ndarray, Box]:
    """Return a JPEG cropped to a box, and the box; the whole JPEG where cropping would not pay."""
    if _area(box) >= _FEWER * _area(header.whole):
        return data, header.whole
    if header.interval[0]:
        (width, height), (right, bottom) = header.interval, box[2:]
        window = box.left // width, box.top // height, -(-right // width), -(-bottom // height)
        grid = -(-header.width // width), -(-header.height // height)
        cut = crop_intervals(data, header.scan, window, grid)
        if cut is None:  # the whole will show what is wrong with it
            return data, header.whole
    else:
        cut = data.copy()
    sides = box.bottom - box.top, box.right - box.left
    numbers = [part for side in sides for part in divmod(side, 256)]
    cut[header.height_at : header.height_at + 4] = numbers
    return cut, box


def _area(box: Box) -> int:
    return (box.right - box.left) * (box.bottom - box.top)


def _header(
    data: memoryview, frame: int, marker: int, orientation: int, interval: int, scan: int
) -> JpegHeader:
    height, width = data[frame + 5] << 8 | data[frame + 6], data[frame + 7] << 8 | data[frame + 8]
    if height == 0 or width == 0:  # the height comes after the first scan: rare
        raise UnusualJpeg
    if width * height > 2 * (Image.MAX_IMAGE_PIXELS or height * width):
        raise UnusualJpeg  # Pillow's limit, and its words
    components, in_scan = data[frame + 9], data[scan + 4] if scan + 4 < len(data) else 0
    if components not in (1, 3):
        raise UnusualJpeg
    in_order = marker == _BASELINE and in_scan == components
    if not in_order or frame + 10 + 3 * components > len(data):
        return JpegHeader(width, height, orientation, 0)
    across = down = 1
    if components > 1:  # alone in a scan, it has blocks one after the other, whatever this says
        factors = bytes(data[frame + 11 : frame + 10 + 3 * components : 3])
        across = max(1, *(factor >> 4 for factor in factors))
        down = max(1, *(factor & 15 for factor in factors))
    sides = _interval_sides(interval, -(-width // (8 * across)), -(-height // (8 * down)))
    start = scan + 2 + (data[scan + 2] << 8 | data[scan + 3])
    return JpegHeader(
        width,
        height,
        orientation,
        frame + 5,
        (8 * across * sides[0], 8 * down * sides[1]),
        min(start, len(data)),
    )


def _interval_sides(interval: int, across: int, down: int) -> tuple[int, int]:
    """Return an interval's width and height in MCUs, 0 where it is no box of them."""
    if interval == 0 or interval >= across * down:
        return 0, 0
    if interval % across == 0:
        return across, interval // across
    return (interval, 1) if across % interval == 0 else (0, 0)


def _orientation(metadata: dict[str | tuple[int, int], Any]) -> int:
    if not metadata:
        return UPRIGHT
    image = Image.Image()
    image.info = metadata
    return orientation_of(image)
