"""Preparation of an encoded image for storage: an upright RGB or grey JPEG, checked by decoding.

Images with other than one or three channels are stored losslessly as ``.npy``: uint8 (H, W, C).
"""

import io
import warnings
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from data_prep.encode.restart_markers import add_restart_markers
from data_prep.files.archives import DamagedItem
from pospre.data.decode import jpeg
from pospre.data.decode.bit_depth import RGB, Decoding, DeepRange, in_eight_bits, said_range
from pospre.data.decode.decoder import DecodeError, decode_otherwise, turned_upright
from pospre.data.decode.formats import NPY_START, RAW, is_raw, npy_bytes, open_picture, why_unknown

_END_OF_IMAGE = b"\xff\xd9"
_SHRINK = 8
_LONGEST_REASON = 200
_THAT_SAY_ALL = (DecodeError, jpeg.JpegError, OSError, ValueError, SyntaxError)
_OF_JPEGS = (1, 3)  # numbers of channels
_MIDDLE = (1, 99)  # percentiles; values outside may be dead pixels
_FEW_LEVELS = 16


@dataclass(frozen=True)
class PreparedImage:
    """A JPEG ready to store, or an ``.npy`` file of other channels."""

    jpeg: bytes
    width: int  # pixels
    height: int  # pixels
    kept: bool  # whether these are the file's own bytes, unchanged
    marked: bool = False  # whether the pixels are the file's own, with restart markers added
    deep: DeepRange | None = None  # for images of more than 8 bits, the values that became 0 to 255
    is_flat: bool = False  # whether such an image is now nearly one grey

    @property
    def num_bytes(self) -> int:
        """Bytes in the data set."""
        return len(self.jpeg)


def prepare_image(
    data: bytes,
    max_side: int | None,
    quality: int,
    *,
    check: str = "full",
    seekable: bool = False,
    decoding: Decoding = RGB,
) -> PreparedImage:
    """Return an encoded image in the form to store.

    The bytes are kept if it is an upright RGB or grey JPEG with no side above ``max_side`` pixels.
    Other images are turned upright, converted to RGB, shrunk to ``max_side`` and encoded at
    ``quality``. Transparency is dropped, as in torchvision's ImageFolder; animations give their
    first frame.

    With the ``check`` ``"full"``, kept JPEGs are decoded, at 1/8 of the size. This reads every
    coefficient, so it detects truncation and damage. With ``"header"``, they are decoded only if
    the end is not as expected. ``seekable`` adds restart markers, so that parts can be
    decoded separately. ``DamagedItem`` if it is not a usable image; no other exception is raised.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns about broken metadata of good images, and about large images
            warnings.simplefilter("ignore")
            if decoding.channels not in _OF_JPEGS:
                return _prepare_bands(data, max_side, decoding)
            prepared = _keep(data, max_side, check) or _prepare(data, max_side, quality, decoding)
            return _mark(prepared) if seekable else prepared
    except Exception as error:  # Pillow's plugins raise almost any kind on damaged bytes
        raise DamagedItem(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, with its type if needed."""
    text = str(error).split("\n", 1)[0][:_LONGEST_REASON]
    if isinstance(error, _THAT_SAY_ALL) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _keep(data: bytes, max_side: int | None, check: str) -> PreparedImage | None:
    """Check a JPEG that can be kept unchanged; None: it cannot, or must be decoded by Pillow."""
    try:
        header = jpeg.read_header(memoryview(data))
    except jpeg.UnusualJpeg:
        return None
    width, height = header.width, header.height
    if header.orientation != jpeg.UPRIGHT or (
        max_side is not None and max(width, height) > max_side
    ):
        return None
    if check == "header" and data.rstrip(b"\0").endswith(_END_OF_IMAGE):
        return PreparedImage(data, width, height, kept=True)
    try:
        jpeg.decode(np.frombuffer(data, np.uint8), header, _SHRINK, header.whole)
    except jpeg.UnusualJpeg:
        return None
    return PreparedImage(data, width, height, kept=True)


def _prepare(data: bytes, max_side: int | None, quality: int, decoding: Decoding) -> PreparedImage:
    if data.startswith(NPY_START):
        pixels, deep = decode_otherwise(np.frombuffer(data, np.uint8), decoding)
        picture = Image.fromarray(pixels[..., 0] if decoding.channels == 1 else pixels)
        return _encode(_shrunk(picture, picture.size, max_side), quality, deep)
    if is_raw(data):
        raise DecodeError(RAW)
    try:
        image: Image.Image = open_picture(data)
    except Image.UnidentifiedImageError as error:
        raise DecodeError(why_unknown(data)) from error
    said = said_range(image)  # before EXIF is read: for a PNG this may load the pixels
    width, height = image.size
    shrink = max_side is not None and max(width, height) > max_side
    is_jpeg = image.format in ("JPEG", "MPO")  # MPO: a JPEG with further pictures behind it
    is_upright = jpeg.orientation_of(image) == jpeg.UPRIGHT
    if is_jpeg and image.mode in ("RGB", "L") and not shrink and is_upright:
        image.draft(None, (1, 1))
        image.load()
        return PreparedImage(data, width, height, kept=True)
    if shrink and is_jpeg and max_side is not None:
        image.draft(None, (3 * max_side, 3 * max_side))
    image, deep = in_eight_bits(turned_upright(image), said, decoding.deep_range)
    image = image.convert("RGB")
    if decoding.channels == 1:
        image = image.convert("L")
    return _encode(_shrunk(image, (width, height), max_side), quality, deep)


def _prepare_bands(data: bytes, max_side: int | None, decoding: Decoding) -> PreparedImage:
    """Return the ``.npy`` file of an image of any number of bands."""
    pixels, deep = decode_otherwise(np.frombuffer(data, np.uint8), decoding)
    size = pixels.shape[1], pixels.shape[0]
    planes = [
        _shrunk(Image.fromarray(plane), size, max_side) for plane in np.moveaxis(pixels, 2, 0)
    ]
    pixels = np.stack([np.asarray(plane) for plane in planes], axis=2)
    stored = npy_bytes(pixels)
    return PreparedImage(
        stored,
        *planes[0].size,
        kept=stored == data,
        deep=deep,
        is_flat=deep is not None and _is_flat(pixels),
    )


def _shrunk(image: Image.Image, size: tuple[int, int], max_side: int | None) -> Image.Image:
    """Return an image with no side above ``max_side``; ``size`` is that of its file."""
    if max_side is None or max(size) <= max_side:
        return image
    scale = max_side / max(size)
    sides = [max(1, round(side * scale)) for side in size]
    if (image.width > image.height) != (size[0] > size[1]):
        sides.reverse()
    return image.resize((sides[0], sides[1]), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _encode(image: Image.Image, quality: int, deep: DeepRange | None) -> PreparedImage:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return PreparedImage(
        buffer.getvalue(),
        image.width,
        image.height,
        kept=False,
        deep=deep,
        is_flat=deep is not None and _is_flat(np.asarray(image)),
    )


def _is_flat(levels: np.ndarray) -> bool:
    """Return whether nearly all of an image lies within a few of 256 levels."""
    low, high = np.percentile(levels, _MIDDLE)
    return bool(high - low < _FEW_LEVELS)


def _mark(image: PreparedImage) -> PreparedImage:
    data = add_restart_markers(image.jpeg)
    if data == image.jpeg:
        return image
    return replace(image, jpeg=data, kept=False, marked=image.kept)
