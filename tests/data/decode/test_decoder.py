"""Decoding agrees with Pillow."""

import io
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from data_prep.encode.images import prepare_image
from pospre.data.decode.decoder import DecodeError, decode_image
from pospre.evaluation.dense.images import read_mask
from tests.conftest import draw_image
from tests.data_prep.sample_images import encoded, turned


def picture(mode: str = "RGB", size: tuple[int, int] = (75, 50)) -> Image.Image:
    return draw_image(1, *size).convert(mode)


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
    data = encoded(picture(), "JPEG", exif=turned(orientation).tobytes())
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


def chunk(kind: bytes, content: bytes, checksum: int | None = None) -> bytes:
    found = zlib.crc32(kind + content) if checksum is None else checksum
    return len(content).to_bytes(4, "big") + kind + content + found.to_bytes(4, "big")


ZEROS = zlib.compress(bytes(9 << 20))
FOREIGN = {
    "text": chunk(b"tEXt", b"Comment\0" + b"x" * (5 << 20)),
    "packed text": chunk(b"zTXt", b"Comment\0\0" + ZEROS),
    "international text": chunk(b"iTXt", b"Comment\0\1\0\0\0" + ZEROS),
    "profile": chunk(b"iCCP", b"ICC\0\0" + ZEROS),
    "text with a wrong checksum": chunk(b"tEXt", b"Comment\0x", checksum=7),
    "time with a wrong checksum": chunk(b"tIME", bytes(7), checksum=7),
}


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", FOREIGN)
def test_texts_of_a_png_do_not_matter(kind, behind, tmp_path):
    whole = encoded(picture("P").quantize(), "PNG", transparency=0, exif=turned(6))
    at = len(whole) - 12 if behind else 33
    data = whole[:at] + FOREIGN[kind] + whole[at:]
    assert np.array_equal(decode(data), pillow(whole)) and pillow(whole).shape[:2] == (75, 50)
    assert prepare_image(data, None, 90) == prepare_image(whole, None, 90)
    (tmp_path / "mask.png").write_bytes(data)
    (tmp_path / "whole.png").write_bytes(whole)
    assert np.array_equal(read_mask(tmp_path / "mask.png"), read_mask(tmp_path / "whole.png"))


def test_a_png_with_damaged_pixels_is_refused():
    whole = bytearray(encoded(picture(), "PNG"))
    whole[60] ^= 1
    with pytest.raises(DecodeError):
        decode(bytes(whole))


def test_texts_that_turn_a_png_count():
    xmp = b'<x:xmpmeta xmlns:tiff="t"><a tiff:Orientation="6"/></x:xmpmeta>'
    whole = encoded(picture(), "PNG")
    data = whole[:33] + chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp) + whole[33:]
    assert decode(data).shape == pillow(data).shape
