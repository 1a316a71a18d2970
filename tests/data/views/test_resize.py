"""Cropping and resizing agree with Pillow and torchvision."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional

from pospre.data.views.boxes import (
    Crops,
    Frame,
    PixelBox,
    box_crops,
    padded_frame,
    random_windows,
    simple_frame,
)
from pospre.data.views.options import INTERPOLATIONS
from pospre.data.views.resize import Views, resize_crops


def picture(size: tuple[int, int]) -> Image.Image:
    coarse = np.random.default_rng(1).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def resize_boxes(
    image: np.ndarray,
    boxes: Sequence[Sequence[int]],
    views: np.ndarray,
    interpolation: str = "bicubic",
) -> None:
    crops = box_crops(np.array(boxes), image.shape[1::-1], views.shape[1:3])
    resize_crops(image, [Views(crops, views, interpolation)])


BOXES = [PixelBox(13, 7, 300, 250), PixelBox(0, 0, 400, 300), PixelBox(30, 40, 20, 25)]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("box", BOXES)
def test_resize_agrees_with_pillow_and_torchvision(interpolation, box):
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    for image in (np.array(picture(size=(400, 300))), noise):
        (view,) = views = np.empty((1, 96, 96, 3), dtype=np.uint8)
        resize_boxes(image, [box], views, interpolation)
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
    resize_boxes(image, [[5, 6, 96, 96], [0, 0, 120, 110]], views)
    assert np.array_equal(views[0], image[6:102, 5:101])
    assert not np.array_equal(views[1], views[0])


def window_cut(
    draw: tuple[float, float], size: tuple[int, int], frame: Frame
) -> tuple[Crops, PixelBox]:
    window = PixelBox(*random_windows(np.array([draw]), frame)[0].tolist())
    whole, windows = np.array([[0, 0, *size]]), np.array([window])
    return Crops(whole, frame.scaled, windows, size, frame.edge), window


@pytest.mark.parametrize("draw", [(0.0, 0.0), (0.999, 0.999), (0.4, 0.7)])
def test_simple_resized_crop_is_torchvisions(draw):
    image = picture(size=(125, 94))
    cut, window = window_cut(draw, (125, 94), simple_frame(125, 94, 56))
    (view,) = views = np.empty((1, 56, 56, 3), np.uint8)
    resize_crops(np.array(image), [Views(cut, views, "bicubic")])
    resized = functional.resize(image, [56], functional.InterpolationMode.BICUBIC)
    assert resized.size == cut.scaled
    padded = functional.pad(resized, [4, 4, 4, 4], padding_mode="reflect")
    expected = functional.crop(padded, window.top + 4, window.left + 4, 56, 56)
    assert np.abs(view.astype(int) - np.asarray(expected).astype(int)).max() <= 1


@pytest.mark.parametrize("draw", [(0.0, 0.0), (0.999, 0.999), (0.5, 0.5)])
def test_padded_crop_is_torchvisions(draw):
    image = picture(size=(32, 32))
    cut, window = window_cut(draw, (32, 32), padded_frame((32, 32)))
    (view,) = views = np.empty((1, 32, 32, 3), np.uint8)
    resize_crops(np.array(image), [Views(cut, views, "bicubic")])
    padded = functional.pad(image, [4, 4, 4, 4])
    expected = functional.crop(padded, window.top + 4, window.left + 4, 32, 32)
    assert np.array_equal(view, np.asarray(expected))


def test_a_tiny_image_is_mirrored_as_often_as_needed():
    (view,) = views = np.empty((1, 2, 2, 3), np.uint8)
    image = np.arange(2 * 40 * 3, dtype=np.uint8).reshape(2, 40, 3)
    cut, _ = window_cut((0.0, 0.0), (40, 2), simple_frame(40, 2, 2))
    resize_crops(image, [Views(cut, views, "bicubic")])
    expected = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")[:2, :2]
    assert np.array_equal(view, expected)


def test_windows_of_one_resized_image_or_of_several():
    """Each is cut as if it were alone; the same part of the image is resized once."""
    image, frame = np.array(picture(size=(125, 94))), Frame((60, 50), (32, 32), 4, "reflect")
    boxes = np.array([[0, 0, 125, 94], [0, 0, 125, 94], [5, 6, 100, 80], [0, 0, 125, 94]])
    windows = random_windows(np.array([[0.2 * n, 0.9] for n in range(4)]), frame)
    together = np.empty((4, 32, 32, 3), np.uint8)
    crops = Crops(boxes, frame.scaled, windows, (125, 94), frame.edge)
    resize_crops(image, [Views(crops, together, "bicubic")])
    for number in range(4):
        alone, one = np.empty((1, 32, 32, 3), np.uint8), slice(number, number + 1)
        cut = crops._replace(boxes=boxes[one], windows=windows[one])
        resize_crops(image, [Views(cut, alone, "bicubic")])
        assert np.array_equal(together[number], alone[0])


def test_groups_are_cut_together_from_any_part_of_the_image():
    """As one by one from the whole: of every interpolation, boxes and windows."""
    image = np.array(picture(size=(125, 94)))
    boxes = np.array([[40, 30, 50, 40], [60, 35, 24, 20]])
    groups, expected = [], []
    for number, kind in enumerate((*INTERPOLATIONS, "bilinear")):
        crops = box_crops(boxes, (125, 94), (20 + number, 24))
        if number == len(INTERPOLATIONS):
            windows = np.array([[-3, 2, 24, 23], [1, 1, 24, 23]])
            crops = crops._replace(windows=windows, edge="reflect")
        views, alone = (np.zeros((2, 20 + number, 24, 3), np.uint8) for _ in range(2))
        resize_crops(image, [Views(crops, alone, kind)])
        groups.append(Views(crops, views, kind))
        expected.append(alone)
    resize_crops(np.ascontiguousarray(image[28:80, 37:100]), groups, origin=(37, 28))
    for group, alone in zip(groups, expected, strict=True):
        assert np.array_equal(group.pixels, alone) and alone.any(axis=(1, 2, 3)).all()
