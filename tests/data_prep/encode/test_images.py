import io
import re
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from data_prep.encode.images import PreparedImage, prepare_image
from data_prep.files.archives import DamagedItem
from pospre.data.decode.decoder import DecodeError, decode_image
from tests.data_prep.sample_images import (
    KEPT,
    dds,
    encoded,
    odd_files,
    picture,
    rotated_jpeg,
    turned,
)


def prepare(data: bytes, max_side: int | None = None) -> PreparedImage:
    return prepare_image(data, max_side, 90)


def why_damaged(data: bytes) -> str:
    with pytest.raises(DamagedItem) as caught:
        prepare(data)
    return str(caught.value)


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


@pytest.mark.parametrize("name", sorted(odd_files()))
def test_every_kind_becomes_an_upright_jpeg(name: str) -> None:
    data = odd_files()[name]
    result = prepare(data)
    assert result.kept == (name in KEPT)
    assert (result.jpeg == data) == result.kept
    stored = Image.open(io.BytesIO(result.jpeg))
    assert stored.format == "JPEG"
    assert stored.size == (result.width, result.height)
    assert stored.mode == ("L" if name == "odd/grey.JPEG" else "RGB")
    assert stored.getexif().get(0x0112, 1) == 1


@pytest.mark.parametrize(
    "name", ["alpha.png", "animated.gif", "bitmap.bmp", "cmyk.jpg", "web.webp", "new.avif"]
)
def test_colours_survive(name: str) -> None:
    files = odd_files() | {"odd/new.avif": encoded(picture(3), "AVIF")}
    result = prepare(files["odd/" + name])
    assert np.abs(pixels(result.jpeg) - np.asarray(picture(3)).astype(int)).mean() < 12


@pytest.mark.parametrize(
    ("flags", "kind"), [(0x40, "ZeroDivisionError"), (8, "NotImplementedError")]
)
def test_whatever_a_decoder_raises_is_a_reason(flags: int, kind: str) -> None:
    assert why_damaged(dds(flags)).startswith(f"{kind}: ")
    with pytest.raises(DecodeError):
        decode_image(torch.frombuffer(bytearray(dds(flags)), dtype=torch.uint8))


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), RuntimeError("odd")])
def test_whatever_an_encoder_raises_is_a_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    data = odd_files()["odd/alpha.png"]
    monkeypatch.setattr(Image.Image, "save", fail)
    assert type(error).__name__ in why_damaged(data)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"\0\0\0\x1cftypheic\0\0\0\0mif1", "HEIC, which Pillow cannot read; .* heif-convert"),
        (b"\xff\x0a\xfa\x7f", "JPEG XL, which .* djxl"),
        (b"<?xml version='1.0'?>\n<svg xmlns=", "SVG, which .* rsvg-convert"),
        (b"%PDF-1.4\n", "PDF, which .* pdftoppm"),
        (b"\0\0\0\x18ftypcrx ", "a camera's raw file, which .* darktable-cli"),
        (b"\0\0\0\x18ftypisom", "a film, which .* ffmpeg"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer; git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "a web page; download"),
        (b"\x89PNG\r\n\x1a\n\0\0", "PNG, but damaged"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF, but damaged"),
        (b"no picture", "no image format that Pillow knows"),
    ],
)
def test_what_pillow_does_not_know_is_named(start: bytes, said: str) -> None:
    data = start + bytes(200)
    assert re.search(said, why_damaged(data))
    with pytest.raises(DecodeError, match=said):
        decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    data = rotated_jpeg(0, orientation)
    result = prepare(data)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))).astype(int)
    assert np.abs(pixels(result.jpeg) - wanted).mean() < 3


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    result = prepare(odd_files()["odd/deep.png"])
    values = pixels(result.jpeg)
    assert abs(values[0, 0].mean()) < 6 and abs(values[-1, -1].mean() - 255) < 6
    assert abs(values.mean() - 127) < 3


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (640, 11)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_max_side_shrinks_and_keeps_the_picture(size: tuple[int, int], kind: str) -> None:
    image = picture(1, *size)
    result = prepare(encoded(image, kind), max_side=100)
    assert not result.kept
    assert max(result.width, result.height) == 100
    scale = 100 / max(size)
    assert (result.width, result.height) == tuple(max(1, round(side * scale)) for side in size)
    wanted = np.asarray(image.resize((result.width, result.height), Image.Resampling.LANCZOS))
    assert np.abs(pixels(result.jpeg) - wanted).mean() < 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_the_orientation_of_other_formats_is_applied(kind: str) -> None:
    image = prepare_image(encoded(picture(), kind, exif=turned(8)), None, 90)
    assert (image.width, image.height) == (32, 48)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_broken_metadata_of_a_good_image_is_no_damage(kind: str) -> None:
    data = encoded(picture(), kind, exif=b"Exif\0\0broken")
    image = prepare_image(data, None, 90)
    assert (image.width, image.height) == (48, 32)
    read = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert read.shape == (32, 48, 3)


def test_max_side_of_a_rotated_jpeg() -> None:
    result = prepare(encoded(picture(1, 300, 200), exif=turned(6)), max_side=150)
    assert (result.width, result.height) == (100, 150)


@given(st.binary(max_size=300), st.sampled_from([b"", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n"]))
@settings(max_examples=60)
def test_arbitrary_bytes_raise_one_kind_of_error(tail: bytes, head: bytes) -> None:
    assert why_damaged(head + tail)


@given(st.data())
@settings(max_examples=60)
def test_damage_raises_one_kind_of_error_and_never_lies(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(sorted(odd_files().values())))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        result = prepare(whole[:cut], data.draw(st.sampled_from([None, 40])))
    except DamagedItem as error:
        assert str(error)
        return
    stored = Image.open(io.BytesIO(result.jpeg))
    stored.load()
    assert stored.size == (result.width, result.height)


@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    mode=st.sampled_from(["RGB", "L", "CMYK", "P", "1", "LA", "RGBA", "I;16"]),
    max_side=st.none() | st.integers(1, 100),
)
@settings(max_examples=60)
def test_size_and_mode_of_anything(
    width: int, height: int, mode: str, max_side: int | None
) -> None:
    image = picture(2, width, height)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    data = encoded(
        image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode), kind
    )
    result = prepare(data, max_side)
    longest = max(width, height) if max_side is None else min(max_side, max(width, height))
    assert max(result.width, result.height) == longest
    assert Image.open(io.BytesIO(result.jpeg)).size == (result.width, result.height)


def test_the_header_check_finds_what_is_cut_off() -> None:
    good = encoded(picture(8, 200, 150), quality=95)
    for data in (good, good + bytes(100), good + b"\xff\xd8more\xff\xd9"):
        kept = prepare_image(data, None, 90, check="header")
        assert kept.jpeg == data and kept.kept
    for end in (len(good) // 2, len(good) - 40):
        with pytest.raises(DamagedItem):
            prepare_image(good[:end], None, 90, check="header")
    # but not what is damaged inside: that is the price
    damaged = bytearray(good)
    damaged[len(good) // 2 : len(good) // 2 + 40] = bytes(range(1, 41))
    prepare_image(bytes(damaged), None, 90, check="header")
    assert why_damaged(bytes(damaged))


@given(st.data())
@settings(max_examples=60)
def test_what_is_kept_can_be_loaded(data: st.DataObject) -> None:
    """The check and the loader agree on what is damaged."""
    whole = bytearray(encoded(picture(8, 64, 48)))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(2, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DamagedItem):
        kept = prepare(bytes(whole)).jpeg
        decode_image(torch.frombuffer(bytearray(kept), dtype=torch.uint8))
