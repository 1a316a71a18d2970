"""Decoding and resizing agree with Pillow and torchvision."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional

from pospre.data.crops import Cuts, Frame, PixelBox, padded_frame, random_windows, simple_frame
from pospre.data.decode import DecodeError, cut_views, decode_image
from pospre.data.resize import resize_crops


def picture(mode: str = "RGB", size: tuple[int, int] = (75, 50)) -> Image.Image:
    coarse = np.random.default_rng(1).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)


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


def test_deep_greyscale_is_scaled_not_clipped():
    deep = (np.arange(60 * 40, dtype=np.uint16) * 27).reshape(40, 60)
    data = encoded(Image.fromarray(deep), "PNG")
    assert np.array_equal(decode(data)[..., 0], deep >> 8)


def test_float_greyscale_is_scaled_not_clipped():
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    data = encoded(Image.fromarray(values), "TIFF")
    assert np.abs(decode(data)[..., 1] - values * 255).max() <= 1


def test_pixels_pass_through():
    pixels = np.asarray(picture())
    assert np.array_equal(decode_image(torch.tensor(pixels)), pixels)


@pytest.mark.parametrize("kept", [0, 1, 10, 300, 0.5, 0.98])
def test_cut_off_jpegs_are_refused(kept):
    data = encoded(picture(size=(400, 300)), "JPEG")
    with pytest.raises(DecodeError):
        decode(data[: kept if isinstance(kept, int) else int(kept * len(data))])


@pytest.mark.parametrize("data", [b"hello", b"\xff\xd8\xff", b"\xff\xd8\xff" + b"x" * 500, b"BM"])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(DecodeError):
        decode(data)


BOXES = [PixelBox(13, 7, 300, 250), PixelBox(0, 0, 400, 300), PixelBox(30, 40, 20, 25)]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("box", BOXES)
def test_resize_agrees_with_pillow_and_torchvision(interpolation, box):
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    for image in (np.array(picture(size=(400, 300))), noise):
        (view,) = views = np.empty((1, 96, 96, 3), dtype=np.uint8)
        resize_crops(image, np.array([box]), views, interpolation)
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        kind = getattr(Image.Resampling, interpolation.upper())
        expected = np.asarray(Image.fromarray(image).crop(corners).resize((96, 96), kind))
        assert np.abs(view.astype(int) - expected).max() <= 1
        tensor = torch.tensor(image).permute(2, 0, 1)
        mode = functional.InterpolationMode(interpolation)
        theirs = functional.resized_crop(
            tensor, box.top, box.left, box.height, box.width, [96, 96], mode, antialias=True
        )
        assert np.abs(view.astype(int) - theirs.permute(1, 2, 0).numpy()).max() <= 1


def test_a_box_of_the_views_size_is_copied():
    image = np.array(picture(size=(120, 110)))
    views = np.empty((2, 96, 96, 3), dtype=np.uint8)
    resize_crops(image, np.array([[5, 6, 96, 96], [0, 0, 120, 110]]), views, "bicubic")
    assert np.array_equal(views[0], image[6:102, 5:101])
    assert not np.array_equal(views[1], views[0])


def window_cut(draw: tuple[float, float], size: tuple[int, int], frame: Frame) -> Cuts:
    windows = random_windows(np.array(draw), frame)[None]
    return Cuts(np.array([[0, 0, *size]]), frame.scaled, windows, size, frame.edge)


@pytest.mark.parametrize("draw", [(0.0, 0.0), (0.999, 0.999), (0.4, 0.7)])
def test_simple_resized_crop_is_torchvisions(draw):
    image = picture(size=(125, 94))
    cut = window_cut(draw, (125, 94), simple_frame(125, 94, 56))
    (view,) = views = np.empty((1, 56, 56, 3), np.uint8)
    cut_views(np.array(image), cut, views, "bicubic")
    resized = functional.resize(image, [56], functional.InterpolationMode.BICUBIC)
    assert resized.size == cut.scaled
    padded = functional.pad(resized, [4, 4, 4, 4], padding_mode="reflect")
    expected = functional.crop(padded, cut.windows[0, 1] + 4, cut.windows[0, 0] + 4, 56, 56)
    assert np.abs(view.astype(int) - np.asarray(expected).astype(int)).max() <= 1


@pytest.mark.parametrize("draw", [(0.0, 0.0), (0.999, 0.999), (0.5, 0.5)])
def test_padded_crop_is_torchvisions(draw):
    image = picture(size=(32, 32))
    cut = window_cut(draw, (32, 32), padded_frame((32, 32)))
    (view,) = views = np.empty((1, 32, 32, 3), np.uint8)
    cut_views(np.array(image), cut, views, "bicubic")
    padded = functional.pad(image, [4, 4, 4, 4])
    expected = functional.crop(padded, cut.windows[0, 1] + 4, cut.windows[0, 0] + 4, 32, 32)
    assert np.array_equal(view, np.asarray(expected))


def test_a_tiny_image_is_mirrored_as_often_as_needed():
    (view,) = views = np.empty((1, 2, 2, 3), np.uint8)
    image = np.arange(2 * 40 * 3, dtype=np.uint8).reshape(2, 40, 3)
    cut = window_cut((0.0, 0.0), (40, 2), simple_frame(40, 2, 2))
    cut_views(image, cut, views, "bicubic")
    expected = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")[:2, :2]
    assert np.array_equal(view, expected)


def test_windows_of_one_resized_image_or_of_several():
    """Each is cut as if it were alone; the same part of the image is resized once."""
    image, frame = np.array(picture(size=(125, 94))), Frame((60, 50), (32, 32), 4, "reflect")
    boxes = np.array([[0, 0, 125, 94], [0, 0, 125, 94], [5, 6, 100, 80], [0, 0, 125, 94]])
    windows = np.stack([random_windows(np.array([0.2 * n, 0.9]), frame) for n in range(4)])
    together = np.empty((4, 32, 32, 3), np.uint8)
    cuts = Cuts(boxes, frame.scaled, windows, (125, 94), frame.edge)
    cut_views(image, cuts, together, "bicubic")
    for number in range(4):
        alone, one = np.empty((1, 32, 32, 3), np.uint8), slice(number, number + 1)
        cut_views(image, cuts._replace(boxes=boxes[one], windows=windows[one]), alone, "bicubic")
        assert np.array_equal(together[number], alone[0])
