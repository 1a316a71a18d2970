"""JPEGs decoded only as far as needed: the same rows, at the size asked for, damage found."""

import io
import resource
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from data_prep.encode.images import prepare_image
from pospre.data.decode import jpeg
from pospre.data.decode.decoder import DecodeError, OpenedImage, decode_image
from pospre.data.decode.jpeg import Box


@cache
def photograph(width: int, height: int, **options: Any) -> bytes:
    coarse = np.random.default_rng(width).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    image.save(buffer, "JPEG", **{"quality": 92, **options})
    return buffer.getvalue()


def opened(data: bytes) -> OpenedImage:
    return OpenedImage(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def rows(data: bytes, top: int, bottom: int, shrink: int = 1) -> tuple[np.ndarray, int, int]:
    """Decode rows; return them, how much smaller they are, and the first of them."""
    image = opened(data)
    pixels, found, (left, first) = image.decode(shrink, Box(0, top, image.width, bottom))
    assert left == 0
    return pixels, found, first


def full(data: bytes) -> np.ndarray:
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@settings(max_examples=40)
@given(
    width=st.integers(8, 90),
    height=st.integers(8, 200),
    share=st.floats(0.01, 1),
    subsampling=st.sampled_from([0, 1, 2]),
    restart=st.sampled_from([0, 1, 3]),
)
def test_rows_left_out_change_no_other(width, height, share, subsampling, restart):
    options = {"restart_marker_rows": restart} if restart else {}
    data = photograph(width, height, subsampling=subsampling, **options)
    bottom = max(1, int(share * height))
    pixels, shrink, _ = rows(data, 0, bottom)
    assert shrink == 1 and bottom <= len(pixels) <= max(height, bottom + 2)
    assert np.array_equal(pixels[:bottom], full(data)[:bottom])


def test_fewer_rows_are_decoded():
    data = photograph(300, 400)
    assert len(rows(data, 0, 100)[0]) == 102
    assert len(rows(data, 0, 390)[0]) == 400  # not worth the copy


def test_progressive_rows_are_all_decoded():
    data = photograph(200, 300, progressive=True)
    assert np.array_equal(rows(data, 0, 60)[0], full(data))


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("size", [(320, 240), (321, 243), (154, 90)])
def test_smaller_images_are_means_of_the_large(shrink, size):
    data = photograph(*size)
    pixels, found, _ = opened(data).decode(shrink)
    assert found == shrink
    assert pixels.shape == (-(-size[1] // shrink), -(-size[0] // shrink), 3)
    rows, columns = size[1] // shrink * shrink, size[0] // shrink * shrink
    blocks = full(data)[:rows, :columns].reshape(
        rows // shrink, shrink, columns // shrink, shrink, 3
    )
    means = blocks.astype(float).mean((1, 3))
    error = pixels[: len(means), : means.shape[1]] - means
    assert np.sqrt((error**2).mean()) < 6


def test_padding_before_the_end_is_no_damage():
    data = photograph(60, 40)
    padded = data[:-2] + bytes(50) + data[-2:]
    assert np.array_equal(full(padded), full(data))
    with pytest.raises(DecodeError, match=r"extraneous bytes"):
        opened(data[:-2] + b"\x12" * 50 + data[-2:]).decode()


@pytest.mark.parametrize("size", [(16000, 16000), (65500, 65500)])
def test_a_header_that_promises_the_earth_costs_nothing(size):
    data = bytearray(photograph(40, 30))
    place = jpeg.read_header(memoryview(data)).height_at
    data[place : place + 4] = size[1].to_bytes(2, "big") + size[0].to_bytes(2, "big")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodeError, match=r"decompression bomb|exceeds limit"):
        opened(bytes(data)).decode()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def app1(content: bytes) -> bytes:
    return b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content


def exif(orientation: int | None) -> bytes:
    tags = Image.Exif()
    tags[0x010F] = "maker"
    if orientation is not None:
        tags[0x0112] = orientation
    return app1(tags.tobytes())


def xmp(text: str, kind: str = "xap/1.0") -> bytes:
    return app1(f"http://ns.adobe.com/{kind}/\0<x>{text}</x>".encode())


SIX = 'tiff:Orientation="6"'


@pytest.mark.parametrize(
    "metadata, is_turned",
    [
        (exif(6), True),
        (exif(1) + xmp(SIX), False),  # a program turned it, and left XMP as it was
        (xmp(SIX) + exif(1), False),
        (exif(9) + xmp(SIX), False),
        (exif(6) + exif(1), True),
        (exif(None) + xmp(SIX), True),
        (xmp(SIX) + exif(None), True),
        (xmp("<tiff:Orientation>6</tiff:Orientation>"), True),
        (xmp(SIX, "xmp/extension"), False),
        (app1(b"Exif\0\0broken"), False),
    ],
)
def test_orientation_is_applied_once_as_in_pillow(metadata, is_turned):
    data = photograph(60, 40)
    data = data[:2] + metadata + data[2:]
    stored = prepare_image(data, None, 95)
    assert stored.kept != is_turned
    assert (stored.width, stored.height) == ((40, 60) if is_turned else (60, 40))
    assert full(stored.jpeg).shape == (stored.height, stored.width, 3)
    if b"broken" in metadata:  # Pillow refuses these, of a good image
        assert np.array_equal(full(data), full(photograph(60, 40)))
    else:
        pillow = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(full(data), np.asarray(pillow))


def test_headers_are_read_past_other_segments():
    data = photograph(40, 30, comment=b"x" * 3000, icc_profile=b"y" * 70000)
    header = jpeg.read_header(memoryview(data))
    assert (header.width, header.height, header.orientation) == (40, 30, 1)
    place = header.height_at
    assert data[place] << 8 | data[place + 1] == 30


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xc0\x00\x02", b"\x89PNG"])
def test_other_bytes_have_no_jpeg_header(data):
    with pytest.raises(jpeg.UnusualJpeg):
        jpeg.read_header(memoryview(data))


@given(
    data=st.data(),
    across=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    down=st.tuples(st.integers(0, 119), st.integers(1, 120)),
    markers=st.sampled_from([{"restart_marker_rows": 1}, {"restart_marker_blocks": 1}]),
)
def test_no_byte_of_a_jpeg_with_markers_can_crash_us(data, across, down, markers):
    whole = bytearray(photograph(40, 120, **markers))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(2, len(whole) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(len(whole) // 2, len(whole))) :]
    try:
        image = opened(bytes(whole))  # its size may be another one now, and boxes lie inside of it
        left, top = min(*across, image.width - 1), min(*down, image.height - 1)
        right, bottom = min(max(across), image.width), min(max(down), image.height)
        box = Box(left, top, max(right, left + 1), max(bottom, top + 1))
        pixels, _, start = image.decode(1, box)
    except DecodeError:
        return
    assert pixels.ndim == 3 and start[0] <= box.left and start[1] <= box.top


@given(place=st.integers(2, 700), value=st.integers(0, 255))
def test_no_byte_of_the_header_can_crash_us(place, value):
    data = bytearray(photograph(40, 30))
    data[place % len(data)] = value
    try:
        pixels = rows(bytes(data), 0, 12)[0]
    except DecodeError:
        return
    assert pixels.ndim == 3
