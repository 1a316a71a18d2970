"""From encoded bytes to pixels: one decoder for every storage format.

JPEGs go through libjpeg-turbo (``pospre.data.jpeg``), everything else, and what that refuses,
through Pillow; both give upright RGB pixels. Neither holds Python's lock while it works, so threads
decode in parallel.
"""

import io
import threading
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from pospre.data import jpeg
from pospre.data.formats import why_unknown

# EXIF's orientations as numpy sees them: mirrored columns, mirrored rows, swapped axes, in order.
_TURNS = {
    2: (True, False, False),
    3: (True, True, False),
    4: (False, True, False),
    5: (False, False, True),
    6: (True, False, True),
    7: (True, True, True),
    8: (False, True, True),
}


_LARGEST_SCRATCH = 1 << 26  # bytes that a thread keeps for its next image


class DecodeError(Exception):
    """The bytes are no image that can be read; the message says why."""


class OpenedImage:
    """An image whose size is known before it is decoded, so that only what is needed is.

    Attributes:
        width: of the upright image in pixels.
        height: likewise.
        num_bytes: that it keeps in memory: a JPEG's own, of others those of the pixels.
    """

    def __init__(self, encoded: Tensor) -> None:
        """Read the header.

        Args:
            encoded: bytes of an image file, uint8 (N,); pixels, uint8 (H, W, 3); or features,
                float32 (H, W, 1).

        Raises:
            DecodeError: the bytes are no image.
        """
        self._pixels: np.ndarray | None = None
        self._header: jpeg.JpegHeader | None = None
        self._data = encoded.numpy()
        if encoded.ndim == 3:
            self._pixels = self._data
        else:
            try:
                self._header = jpeg.read_header(self._data.data)
            except jpeg.UnusualJpeg:
                self._pixels = self._data = _decode_with_pillow(self._data.tobytes())
        if self._header is not None:
            sides = self._header.width, self._header.height
            self.width, self.height = sides[::-1] if self._header.orientation > 4 else sides
        elif self._pixels is not None:
            self.height, self.width = self._pixels.shape[:2]
        self.num_bytes = self._data.nbytes

    def decode(
        self, shrink: int = 1, box: jpeg.Box | None = None
    ) -> tuple[np.ndarray, int, tuple[int, int]]:
        """Return the upright image, (H, W, channels), how much smaller it is, and where it begins.

        The pixels are good until this thread decodes again. Images that cannot be decoded smaller
        come in full. Where they begin is a column and a row of the full size, multiples of the
        shrinking: what lies left of them and above is left out.

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
        turned = header.orientation != 1
        if turned:  # a grid of shrunk pixels would start at another side
            shrink, box = 1, None
        try:
            buffer = _scratch(jpeg.num_bytes(header, shrink))
            pixels, start = jpeg.decode(self._data, header, shrink, box or header.whole, buffer)
        except jpeg.UnusualJpeg:
            return _decode_with_pillow(self._data.tobytes()), 1, (0, 0)
        except (jpeg.JpegError, MemoryError) as error:
            raise DecodeError(str(error)) from error
        return (_turn(pixels, header.orientation) if turned else pixels), shrink, start


def decode_image(encoded: Tensor) -> np.ndarray:
    """Return the whole upright image in full size, in memory of its own; see ``OpenedImage``.

    Raises:
        DecodeError: the bytes are cut off, damaged or no image.
    """
    return OpenedImage(encoded).decode()[0].copy()


_threads = threading.local()


def _scratch(num_bytes: int) -> np.ndarray:
    """Return this thread's room for pixels: fresh memory would cost a page fault every 4 kB."""
    if num_bytes > _LARGEST_SCRATCH:
        return np.empty(num_bytes, np.uint8)
    buffer: np.ndarray | None = getattr(_threads, "buffer", None)
    if buffer is None or len(buffer) < num_bytes:
        buffer = _threads.buffer = np.empty(num_bytes, np.uint8)
    return buffer


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    columns, rows, swapped = _TURNS[orientation]
    if swapped:
        pixels = pixels.transpose(1, 0, 2)
    return np.ascontiguousarray(pixels[:: -1 if rows else 1, :: -1 if columns else 1])


def _decode_with_pillow(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as opened:
            image = to_rgb(ImageOps.exif_transpose(opened))
            return np.array(image)
    except Exception as error:  # Pillow's plugins raise nearly every kind on damaged bytes
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = why_unknown(data)
        raise DecodeError(reason if data else "the file is empty") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB; 16-bit and float greyscale are scaled, not clipped."""
    if image.mode.startswith("I"):  # 65535 is white
        deep = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        image = Image.fromarray(deep.astype(np.uint8))
    elif image.mode == "F":  # white is 1 when nothing is brighter, else 255
        pixels: Any = np.nan_to_num(np.asarray(image))
        white = 1.0 if pixels.max() <= 1.0 else 255.0
        image = Image.fromarray(np.clip(pixels * (255.0 / white), 0, 255).astype(np.uint8))
    return image.convert("RGB")
