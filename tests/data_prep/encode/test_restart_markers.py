"""Restart markers in every row: no pixel changes, whatever the file; parts decode alone."""

import io
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.encode.restart_markers import add_restart_markers, mcus_between_markers
from pospre.data.decode import jpeg
from pospre.data.decode.decoder import DecodeError, OpenedImage
from pospre.data.decode.jpeg import Box

SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


@cache
def picture(width: int, height: int) -> np.ndarray:
    noise = np.random.default_rng(width).normal(0, 12, (height, width, 3))
    coarse = np.random.default_rng(height).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)


def plain(width: int, height: int, sampling: str = "420", quality: int = 90) -> bytes:
    pixels, colours = picture(width, height), "RGB"
    if sampling == "Gray":
        pixels, colours = np.ascontiguousarray(pixels[..., :1]), "GRAY"
    return simplejpeg.encode_jpeg(pixels, quality, colours, sampling)


def by_pillow(width: int, height: int, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(width, height)).save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def decoded(data: bytes) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, "RGB", strict=True)


def opened(data: bytes) -> OpenedImage:
    return OpenedImage(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def is_seekable(data: bytes) -> bool:
    return jpeg.read_header(memoryview(data)).interval != (0, 0)


@settings(max_examples=60)
@given(
    width=st.integers(1, 100),
    height=st.integers(1, 150),
    sampling=st.sampled_from(SAMPLINGS),
    quality=st.sampled_from([5, 50, 90, 100]),
)
@example(width=40, height=40, sampling="440", quality=90)
def test_pixels_stay_to_the_bit(width, height, sampling, quality):
    data = plain(width, height, sampling, quality)
    found = add_restart_markers(data)
    assert found != data
    assert np.array_equal(decoded(found), decoded(data))
    assert add_restart_markers(found) == found


@pytest.mark.parametrize(
    "options",
    [
        {"optimize": True},
        {"optimize": True, "quality": 30},
        {"restart_marker_blocks": 3},
        {"restart_marker_blocks": 100},
        {"restart_marker_rows": 2},
        {"comment": b"\xff\xd0" * 50, "icc_profile": b"\xff\xd9\xff\xda" * 9000},
    ],
)
def test_other_tables_intervals_and_segments(options):
    data = by_pillow(150, 250, **options)
    found = add_restart_markers(data)
    assert is_seekable(found) and found != data
    assert np.array_equal(decoded(found), decoded(data))


@pytest.mark.parametrize("level", [0, 3, 128, 250, 255])
def test_tables_that_lack_categories_are_widened(level):
    pixels = np.full((90, 70, 3), level, np.uint8)
    pixels[40:, 20:] += 1
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", optimize=True, quality=100)
    found = add_restart_markers(buffer.getvalue())
    assert is_seekable(found)
    assert np.array_equal(decoded(found), decoded(buffer.getvalue()))


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 3}])
def test_what_cannot_or_need_not_have_markers_is_kept(options):
    data = by_pillow(90, 130, **options)
    assert add_restart_markers(data) == data


def test_cmyk_and_other_files_are_kept():
    buffer = io.BytesIO()
    Image.new("CMYK", (64, 64)).save(buffer, "JPEG")
    png = io.BytesIO()
    Image.new("RGB", (64, 64)).save(png, "PNG")
    for data in (buffer.getvalue(), png.getvalue(), b"", b"\xff\xd8\xff"):
        assert add_restart_markers(data) == data


def test_what_follows_the_image_stays():
    data = plain(60, 70)
    for tail in (b"\0\0", b"\xff\xd9", plain(20, 20), b"\xff\xd0text"):
        found = add_restart_markers(data + tail)
        assert found == add_restart_markers(data) + tail
        pixels, _, (_, first) = opened(found).decode(1, Box(0, 50, 60, 60))
        assert first and np.array_equal(pixels[50 - first : 60 - first], decoded(data)[50:60])


def test_fillers_before_the_end_are_allowed():
    data = plain(60, 70)
    filled = data[:-2] + b"\xff\xff" + data[-2:]
    assert np.array_equal(decoded(add_restart_markers(filled)), decoded(data))


def outcome(data: bytes) -> np.ndarray | None:
    try:
        return decoded(data)
    except ValueError:
        return None


WHOLE = [plain(50, 70, sampling) for sampling in SAMPLINGS]
WHOLE += [by_pillow(50, 70, optimize=True), by_pillow(50, 70, restart_marker_blocks=2)]


@settings(max_examples=200)
@given(st.data())
def test_damage_changes_nothing_else(data):
    whole = bytearray(data.draw(st.sampled_from(WHOLE)))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole))) :]
    damaged = bytes(whole)
    found = add_restart_markers(damaged)
    if found == damaged:
        return
    before, after = outcome(damaged), outcome(found)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert np.array_equal(before, after)


@given(st.data())
def test_parts_decode_as_in_the_whole(data):
    width, height = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200))
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    shrink = data.draw(st.sampled_from([1, 2, 4, 8]))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = Box(
        left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height))
    )
    whole = plain(width, height, sampling)
    expected, _, none = opened(whole).decode(shrink)
    pixels, found, start = opened(add_restart_markers(whole)).decode(shrink, box)
    assert none == (0, 0) and found == shrink
    assert start[0] % shrink == start[1] % shrink == 0
    assert start[0] <= left and start[1] <= top
    across, down = ((first // shrink, -(-last // shrink)) for first, last in (box[::2], box[1::2]))
    first_column, first_row = start[0] // shrink, start[1] // shrink
    kept = pixels[down[0] - first_row : down[1] - first_row]
    kept = kept[:, across[0] - first_column : across[1] - first_column]
    assert np.array_equal(kept, expected[slice(*down), slice(*across)])


@pytest.mark.parametrize(("sampling", "side"), [("444", 8), ("422", 8), ("420", 16), ("Gray", 8)])
def test_what_lies_around_is_left_out(sampling, side):
    data = add_restart_markers(plain(320, 200, sampling))
    width, height = jpeg.read_header(memoryview(data)).interval
    assert height == side and width < 100
    pixels, _, start = opened(data).decode(1, Box(100, 100, 150, 120))
    assert start == (98 // width * width, 98 // height * height)
    assert pixels.shape == (
        -(-122 // height) * height - start[1],
        -(-152 // width) * width - start[0],
        3,
    )
    assert opened(data).decode(1, Box(1, 1, 319, 199))[2] == (0, 0)  # not worth the copy


@pytest.mark.parametrize(
    ("per_row", "expected"),
    [(32, 4), (24, 4), (21, 3), (25, 5), (63, 3), (22, 2), (13, 13), (19, 1), (31, 1), (1, 1)],
)
def test_markers_divide_rows_evenly(per_row, expected):
    assert mcus_between_markers(per_row) == expected


def test_intervals_of_several_rows_serve_too():
    data = by_pillow(64, 300, restart_marker_rows=3, subsampling=2)
    assert jpeg.read_header(memoryview(data)).interval == (64, 48)
    pixels, _, start = opened(data).decode(1, Box(20, 150, 30, 200))
    assert start == (0, 144)
    assert np.array_equal(pixels[6:56], decoded(data)[150:200])


def test_intervals_across_rows_do_not():
    data = by_pillow(70, 300, restart_marker_blocks=3, subsampling=2)  # a row has 5 MCUs
    assert jpeg.read_header(memoryview(data)).interval == (0, 0)
    pixels, _, start = opened(data).decode(1, Box(20, 250, 30, 260))
    assert start == (0, 0) and np.array_equal(pixels[250:260], decoded(data)[250:260])


def test_lost_markers_are_not_trusted():
    """What lacks a marker is decoded as a whole, which shows what is wrong."""
    data = add_restart_markers(plain(64, 300, "444"))
    place = data.index(b"\xff\xd5")
    broken = data[:place] + data[place + 2 :]
    with pytest.raises(DecodeError, match=r"marker|Premature"):
        opened(broken).decode(1, Box(0, 200, 64, 250))


def test_damage_in_the_crop_is_noticed_as_in_the_whole():
    """Where the whole image is refused, the crop is too, or none of its pixels is touched."""
    data = add_restart_markers(plain(160, 128))
    box, sound = Box(50, 50, 90, 80), decoded(data)
    refused = 0
    for place in np.random.default_rng(3).integers(len(data) // 4, len(data) - 2, 400):
        broken = bytearray(data)
        broken[place] ^= 1 << int(place) % 8
        if outcome(bytes(broken)) is not None:
            continue
        try:
            pixels, _, (left, top) = opened(bytes(broken)).decode(1, box)
        except DecodeError:
            refused += 1
            continue
        found = pixels[box.top - top : box.bottom - top, box.left - left : box.right - left]
        assert np.array_equal(found, sound[box.top : box.bottom, box.left : box.right])
    assert refused > 5


def test_real_photographs(test_data: Path):
    paths = sorted((test_data / "imagenet_sample").glob("*/*.JPEG"))[::40]
    growth = []
    for path in paths:
        data = path.read_bytes()
        found = add_restart_markers(data)
        growth.append(len(found) / len(data) - 1)
        assert is_seekable(found)
        assert np.array_equal(*(simplejpeg.decode_jpeg(one, strict=False) for one in (data, found)))
    assert np.mean(growth) < 0.06
