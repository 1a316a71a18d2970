"""From encoded bytes to a view: one decoder, one crop and resize for every storage format.

JPEGs go through libjpeg-turbo by way of torchvision, everything else (and what it refuses) through
Pillow; both give the same upright RGB pixels. Neither holds Python's lock while it works, so
threads decode in parallel.
"""

import io
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from pospre.data.crops import Cut, PixelBox

_JPEG_START = b"\xff\xd8\xff"


class DecodeError(Exception):
    """The bytes are no image that can be read; the message says why."""


def decode_image(encoded: Tensor) -> np.ndarray:
    """Return the upright RGB image, uint8 (H, W, 3); pixels and features come back as they are.

    Args:
        encoded: bytes of an image file, uint8 (N,); pixels, uint8 (H, W, 3); or features, float32
            (H, W, 1).

    Raises:
        DecodeError: the bytes are cut off, damaged or no image.
    """
    if encoded.ndim == 3:
        return encoded.numpy()
    if encoded[:3].numpy().tobytes() == _JPEG_START:
        try:
            image = decode_jpeg(encoded, ImageReadMode.RGB, apply_exif_orientation=True)
            return cast(Tensor, image).permute(1, 2, 0).numpy()
        except RuntimeError:
            pass  # a rare kind of JPEG, or a broken one: Pillow reads it or says what is wrong
    return _decode_with_pillow(encoded.numpy().tobytes())


def resize_crop(image: np.ndarray, box: PixelBox, view: np.ndarray, interpolation: str) -> None:
    """Cut ``box`` out of an image (H, W, 3) and resize it into ``view`` (h, w, 3), all uint8.

    The resize is antialiased like Pillow's and torchvision's: pixels differ by at most 1 from
    Pillow's ``crop(box).resize(…)``.
    """
    # A contiguous copy, by numpy: torch would copy a strided slice with its own pool of threads.
    crop = np.ascontiguousarray(
        image[box.top : box.top + box.height, box.left : box.left + box.width]
    )
    if crop.shape == view.shape:
        np.copyto(view, crop)
        return
    resized = torch.nn.functional.interpolate(
        # Batch first, then permuted: these strides are what selects the fast channels-last kernel.
        torch.from_numpy(crop)[None].permute(0, 3, 1, 2),
        size=view.shape[:2],
        mode=interpolation,
        antialias=True,
    )
    np.copyto(view, resized.permute(0, 2, 3, 1)[0].numpy())


def cut_view(image: np.ndarray, cut: Cut, view: np.ndarray, interpolation: str) -> None:
    """Write the view that ``cut`` describes into ``view`` (h, w, 3), all uint8."""
    if cut.is_whole:
        resize_crop(image, cut.box, view, interpolation)
        return
    scaled = np.empty((cut.scaled[1], cut.scaled[0], 3), np.uint8)
    resize_crop(image, cut.box, scaled, interpolation)
    window = cut.window
    rows, no_row = _lines(window.top, window.height, cut.scaled[1])
    columns, no_column = _lines(window.left, window.width, cut.scaled[0])
    np.copyto(view, scaled[rows[:, None], columns])
    if cut.edge == "black":
        view[no_row] = 0
        view[:, no_column] = 0


def _lines(start: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of ``size`` lines to take, mirrored at both ends, and which lie beyond."""
    wanted = np.arange(start, start + count)
    period = max(2 * size - 2, 1)
    folded = np.abs((wanted + size - 1) % period - (size - 1))
    return folded, (wanted < 0) | (wanted >= size)


def _decode_with_pillow(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as opened:
            image = to_rgb(ImageOps.exif_transpose(opened))
            return np.array(image)
    except Exception as error:  # Pillow's plugins raise nearly every kind on damaged bytes
        reason = str(error) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "no known image format"
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
