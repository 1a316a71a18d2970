"""Decoding agrees with Pillow."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from pospre.data.decode.decoder import DecodeError, decode_image
from tests.conftest import draw_image


def picture(mode: str = "RGB", size: tuple[int, int] = (75, 50)) -> Image.Image:
    return draw_image(1, *size).convert(mode)


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def decode(data: bytes) -> np.ndarray:
    return decode_image(torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)))


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_are_pillows_pixels(mode, progressive):
    data = encoded(picture(mode), "JPEG", progressive=progressive)
    assert np.array_equal(decode(data), pillow(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_photographs_are_made_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), "JPEG", exif=exif.tobytes())
    assert decode(data).shape == ((50, 75, 3) if orientation < 5 else (75, 50, 3))
    assert np.array_equal(decode(data), pillow(data))


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [
        ("RGB", "PNG"),
        ("L", "PNG"),
        ("P", "PNG"),
        ("RGBA", "PNG"),
        ("1", "PNG"),
        ("P", "GIF"),
        ("RGB", "BMP"),
        ("CMYK", "TIFF"),
    ],
)
def test_other_formats_are_pillows_pixels(mode, file_format):
    data = encoded(picture(mode), file_format)
    assert np.array_equal(decode(data), pillow(data))


@pytest.mark.parametrize("kept", [0, 1, 10, 300, 0.5, 0.98])
def test_cut_off_jpegs_are_refused(kept):
    data = encoded(picture(size=(400, 300)), "JPEG")
    with pytest.raises(DecodeError, match="Premature end" if kept in (0.5, 0.98) else None):
        decode(data[: kept if isinstance(kept, int) else int(kept * len(data))])


@pytest.mark.parametrize("data", [b"hello", b"\xff\xd8\xff", b"\xff\xd8\xff" + b"x" * 500, b"BM"])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(DecodeError):
        decode(data)
