"""From encoded bytes to pixels: one decoder for every storage format.

libjpeg-turbo (``jpeg``) decodes JPEGs. Pillow decodes everything else, and JPEGs that libjpeg-turbo
refuses. Both give upright RGB pixels. Neither holds Python's lock while it works, so threads decode
in parallel. ``formats`` reads arrays (``.npy``) and TIFFs of several bands, ``bit_depth`` maps
values of more than 8 bits.
"""

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from pospre.data.decode import jpeg
from pospre.data.decode.bit_depth import (
    RGB,
    Decoding,
    DeepRange,
    in_eight_bits,
    said_range,
    to_levels,
)
from pospre.data.decode.formats import (
    NPY_START,
    RAW,
    TIFF_STARTS,
    arrange,
    is_raw,
    open_picture,
    read_npy,
    read_tiff,
    why_unknown,
)

_PICTURES = {1, 3}  # numbers of channels that any picture can be converted to


class DecodeError(Exception):
    """The bytes cannot be read as an image; the message gives the reason."""


class OpenedImage:
    """An image whose size is known before decoding, so that only the needed part is decoded.

    Attributes:
        width: width of the upright image in pixels.
        num_bytes: bytes that it keeps in memory: the file for a JPEG, otherwise the pixels.
        deep: for images of more than 8 bits, the values that became 0 to 255; otherwise None.
    """

    def __init__(self, encoded: Tensor, decoding: Decoding = RGB) -> None:
        """Read the header.

        Args:
            encoded: bytes of an image file, uint8 (N,); pixels, uint8 (H, W, 3); or features,
                float32 (H, W, 1).
            decoding: how to decode it; features are not changed.

        Raises:
            DecodeError: the bytes are no image, or one of other channels.
        """
        self._pixels: np.ndarray | None = None
        self._header: jpeg.JpegHeader | None = None
        self._data = encoded.numpy()
        self._channels = decoding.channels
        self.deep: DeepRange | None = None
        if encoded.ndim == 3:
            is_image = self._data.dtype == np.uint8
            self._pixels = _fit(self._data, decoding.channels) if is_image else self._data
        else:
            try:
                self._header = jpeg.read_header(self._data.data)
                if self._channels not in _PICTURES:
                    raise DecodeError(f"a JPEG has no {self._channels} channels")
            except jpeg.UnusualJpeg:
                self._pixels, self.deep = decode_otherwise(self._data, decoding)
                self._data = self._pixels
        if self._header is not None:
            self.width, self.height = self._header.upright_sides
        elif self._pixels is not None:
            self.height, self.width = self._pixels.shape[:2]
        self.num_bytes = self._data.nbytes

    def decode(
        self, shrink: int = 1, box: jpeg.Box | None = None
    ) -> tuple[np.ndarray, int, tuple[int, int]]:
        """Return the upright image (H, W, channels), its shrink factor and its origin.

        Images that cannot be decoded smaller come in full. They begin at a column and a row of the
        full size, both multiples of ``shrink``. Pixels to the left and above are left out.

        Args:
            shrink: 1, 2, 4 or 8: how much smaller it may be. Sides are rounded up.
            box: part of the full-size image that is needed; the rest may be left out. None needs
                all.

        Raises:
            DecodeError: the bytes are cut off or damaged.
        """
        header = self._header
        if header is None:
            assert self._pixels is not None
            return self._pixels, 1, (0, 0)
        rotated = header.orientation != jpeg.UPRIGHT
        if rotated:  # a grid of shrunk pixels would start at another side
            shrink, box = 1, None
        try:
            pixels, start = jpeg.decode(self._data, header, shrink, box or header.whole)
        except jpeg.UnusualJpeg:
            return decode_otherwise(self._data, Decoding(self._channels))[0], 1, (0, 0)
        except (jpeg.JpegError, MemoryError) as error:
            raise DecodeError(str(error)) from error
        if self._channels == 1:
            pixels = grey(pixels)
        return (_upright(pixels, header.orientation) if rotated else pixels), shrink, start


def decode_image(encoded: Tensor, decoding: Decoding = RGB) -> np.ndarray:
    """Return the whole upright image in full size; see ``OpenedImage``."""
    return OpenedImage(encoded, decoding).decode()[0]


def turned_upright(image: Image.Image) -> Image.Image:
    """Return an image turned as its metadata say."""
    image.load()  # rotates a TIFF, which then reports that it is upright
    return image if jpeg.orientation_of(image) == jpeg.UPRIGHT else ImageOps.exif_transpose(image)


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an orientation of EXIF; unknown ones are upright."""
    if 4 < orientation < 9:
        pixels = pixels.transpose(1, 0, 2)
    down, right = -1 if orientation in (3, 4, 7, 8) else 1, -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::down, ::right])


def decode_otherwise(data: np.ndarray, decoding: Decoding) -> tuple[np.ndarray, DeepRange | None]:
    """Decode arrays and all images left to Pillow: upright pixels uint8 (H, W, channels).

    Return the pixels, and for more than 8 bits the values that became 0 to 255.

    Raises:
        DecodeError: the bytes are damaged, no image, or one of other channels.
    """
    try:
        start = data[: len(NPY_START)].tobytes()
        if start == NPY_START:
            return _of_array(read_npy(data), decoding)
        if start.startswith(TIFF_STARTS) and is_raw(data.tobytes()):
            raise ValueError(RAW)
        if decoding.channels not in _PICTURES and start.startswith(TIFF_STARTS):
            values, orientation = read_tiff(data.tobytes())
            pixels, deep = _of_array(values, decoding)
            return _upright(pixels, orientation), deep
        with open_picture(data.tobytes()) as opened:
            said = said_range(opened)
            image, deep = in_eight_bits(turned_upright(opened), said, decoding.deep_range)
            return in_channels(image, decoding.channels), deep
    except Exception as error:  # Pillow's plugins raise nearly every kind on damaged bytes
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = why_unknown(data.tobytes())
        raise DecodeError(reason if len(data) else "the file is empty") from error


def in_channels(image: Image.Image, channels: int) -> np.ndarray:
    """Return the pixels (H, W, channels) of an image of 8 bits, as ``Decoding.channels`` says."""
    if channels in _PICTURES:
        return _fit(np.array(image.convert("RGB")), channels)
    return arrange(np.array(image), (channels,))


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return RGB pixels (H, W, 3) as grey ones (H, W, 1)."""
    return np.array(Image.fromarray(pixels).convert("L"))[..., None]


def _of_array(values: np.ndarray, decoding: Decoding) -> tuple[np.ndarray, DeepRange | None]:
    channels = decoding.channels
    values = arrange(
        values, (channels, *(_PICTURES - {channels})) if channels in _PICTURES else (channels,)
    )
    levels, deep = to_levels(values, decoding.deep_range)
    return np.ascontiguousarray(_fit(levels, channels)), deep


def _fit(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert colour to grey, or grey to colour, if required."""
    depth = pixels.shape[2]
    if depth == channels:
        return pixels
    if (depth, channels) == (3, 1):
        return grey(pixels)
    if (depth, channels) == (1, 3):
        return np.repeat(pixels, 3, axis=2)
    raise DecodeError(f"it has {depth} channels, but {channels} are needed")
