"""Decoding smaller stays within the tolerance; crops and resizes agree with Pillow, torchvision."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import functional

from pospre.data.decode.jpeg import SHRINKS
from pospre.data.loader import build_loader
from pospre.data.views.boxes import (
    Crops,
    Frame,
    PixelBox,
    box_crops,
    padded_frame,
    random_windows,
    simple_frame,
)
from pospre.data.views.crop_plan import plan_views
from pospre.data.views.decode_crops import (
    _OVERSAMPLING,
    Views,
    _snapped,
    choose_shrink,
    least_oversampling,
    resize_crops,
    snap,
)
from pospre.data.views.options import INTERPOLATIONS, ViewGroup
from tests.conftest import draw_image


def test_the_oversampling_grows_with_the_demand():
    assert [least_oversampling(some) for some in (0, 0.7, 100)] == [math.inf, math.inf, 1.25]
    tolerances = np.linspace(0.75, 4, 50)
    found = [least_oversampling(tolerance) for tolerance in tolerances]
    assert found == sorted(found, reverse=True)


def test_the_view_that_needs_most_decides():
    boxes = np.array([[0, 0, 2000, 2000], [0, 0, 300, 300]])
    large, both = (box_crops(some, (2000, 2000), (100, 100)) for some in (boxes[:1], boxes))
    assert choose_shrink([large], 2.5) == 8
    assert choose_shrink([both], 1.5) == choose_shrink([large, both], 1.5) == 2
    assert choose_shrink([large, both], 2.5) == 1
    assert choose_shrink([large], float("inf")) == 1


@given(st.data())
def test_snapped_boxes_lie_inside_and_near(data):
    """Of boxes that have at least a pixel in the smaller image, as ``choose_shrink`` sees to."""
    shrink = data.draw(st.sampled_from([2, 4, 8]))
    width, height = (data.draw(st.integers(2 * shrink, 999)) for _ in range(2))
    across, down = (data.draw(st.integers(shrink, side)) for side in (width, height))
    left, top = data.draw(st.integers(0, width - across)), data.draw(st.integers(0, height - down))
    boxes = np.array([[left, top, across, down], [0, 0, width, height]])
    small = snap(boxes, shrink, width, height)
    assert (small[:, :2] >= 0).all() and (small[:, 2:] > 0).all()
    assert (small[:, :2] + small[:, 2:] <= (width // shrink, height // shrink)).all()
    assert (np.abs(small * shrink - boxes) <= 1.5 * shrink).all()


@given(st.data())
def test_what_lies_in_another_view_does_so_in_a_smaller_image(data):
    shrink = data.draw(st.sampled_from([2, 4, 8]))
    image = tuple(data.draw(st.integers(2 * shrink, 999)) for _ in range(2))
    index = np.array([data.draw(st.integers(0, 2**60))])
    groups = [ViewGroup(), ViewGroup(name="query", count=2, scale=(0.2, 1.0), inside="view")]
    outer, inner = (
        plan.crops(0, *image) for plan in plan_views(groups, seed=0, epoch=0, index=index)
    )
    around, boxes = (_snapped(crops, shrink) for crops in (outer, inner))
    assert (boxes[:, 2:] > 0).all() and (boxes[:, :2] >= around[:, :2]).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= around[:, :2] + around[:, 2:]).all()
    free = snap(inner.boxes, shrink, *image)
    assert (np.abs(boxes - free) <= 2).all()


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_view_inside_of_another_shows_what_its_box_says(tmp_path, suffix):
    """The same pixels as of a file that holds the box alone; JPEGs are decoded smaller."""
    random = np.random.default_rng(0)
    small = Image.fromarray(random.integers(0, 256, (30, 40, 3), np.uint8))
    photo = small.resize((1200, 900), Image.Resampling.BICUBIC)
    groups = [
        ViewGroup(size=32, scale=(0.5, 0.9)),
        ViewGroup(name="query", count=3, size=16, scale=(0.3, 0.6), inside="view"),
    ]
    options: dict[str, Any] = {"batch_size": 1, "tolerance": 1.0 if suffix == "jpg" else 0.0}
    folder = save(tmp_path / "whole", suffix, photo)
    (batch,) = build_loader(folder, views=groups, **options)
    decoded = Image.open(next(folder.iterdir())).convert("RGB")
    box = batch["query/box"][0].double().numpy() * [1200, 900, 1200, 900]
    assert (batch["query/box"][0, :, :2] >= batch["view/box"][0, :, :2]).all()
    assert (batch["query/box"][0, :, 2:] <= batch["view/box"][0, :, 2:]).all()
    for view, place in enumerate(np.rint(box).astype(int).tolist()):
        part = save(tmp_path / f"part{view}", "png", decoded.crop(tuple(place)))
        (cut,) = build_loader(part, views=[ViewGroup(size=16, crop="full")], **options)
        apart = cut["view/image"][0, 0].double() - batch["query/image"][0, view].double()
        assert apart.square().mean().sqrt() <= (3 if suffix == "jpg" else 0)


def save(folder: Path, suffix: str, image: Image.Image) -> Path:
    folder.mkdir()
    options: dict[str, Any] = {"quality": 95} if suffix == "jpg" else {"compress_level": 1}
    image.save(folder / f"one.{suffix}", **options)
    return folder


@pytest.mark.parametrize("crop", ["random", "simple", "full"])
def test_boxes_do_not_depend_on_what_can_be_decoded_smaller(tmp_path, crop):
    image = draw_image(3, 1203, 901)
    scale = (0.3, 1.0) if crop == "random" else ViewGroup.scale
    views = [ViewGroup(size=64, count=3, crop=crop, scale=scale)]
    settings: dict[str, Any] = {"views": views, "batch_size": 1, "seed": 2, "num_workers": 0}
    batches = [
        next(iter(build_loader(save(tmp_path / suffix, suffix, image), **settings)))
        for suffix in ("jpg", "png")
    ]
    assert torch.equal(batches[0]["view/box"], batches[1]["view/box"])
    difference = batches[0]["view/image"].float() - batches[1]["view/image"].float()
    assert difference.square().mean().sqrt() < 2
    if crop == "random":
        exact = build_loader(tmp_path / "jpg", **settings, tolerance=0)
        moved = next(iter(exact))["view/box"] - batches[0]["view/box"]
        assert 0 < moved.abs().max() < 1.5 * 4 / 901


@pytest.fixture(scope="module")
def photographs(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Folders of one photograph each, as a JPEG and as a PNG, which is decoded in full."""
    root = tmp_path_factory.mktemp("photographs")
    pairs = []
    for path in sorted((test_data / "imagenet_sample").glob("*/*.JPEG"))[::160]:
        folders = [root / suffix / path.stem for suffix in ("jpg", "png")]
        for folder in folders:
            folder.mkdir(parents=True)
        shutil.copy(path, folders[0] / "one.jpg")
        Image.open(path).convert("RGB").save(folders[1] / "one.png", compress_level=1)
        pairs.append(folders)
    return pairs


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shrink", SHRINKS)
def test_views_stay_within_the_tolerance(photographs, shrink, interpolation):
    """Views of photographs cut as large as the tolerance allows at 1/shrink, beside full size."""
    for tolerance, pixels in _OVERSAMPLING:
        errors = []
        for folders in photographs:
            shortest = min(Image.open(folders[1] / "one.png").size)
            side = int((shortest - shrink) / (shrink * pixels))
            group = ViewGroup(size=side, crop="full", interpolation=interpolation)
            ours, exact = (only_view(folder, group, tolerance) for folder in folders)
            errors.append((ours - exact).square().mean().sqrt().item())
        assert 0.3 * tolerance < np.mean(errors) <= tolerance, (tolerance, np.mean(errors))


def only_view(folder: Path, group: ViewGroup, tolerance: float) -> torch.Tensor:
    loader = build_loader(
        folder, views=[group], batch_size=1, seed=0, num_workers=0, tolerance=tolerance
    )
    return next(iter(loader))["view/image"].float()


def test_area_views_come_from_the_full_size_image(tmp_path):
    coarse = np.random.default_rng(3).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((1200, 900), Image.Resampling.BICUBIC)
    folder = save(tmp_path / "jpg", "jpg", image)
    group = ViewGroup(size=50, crop="full", interpolation="area")
    exact, allowed = (only_view(folder, group, tolerance) for tolerance in (0.0, 100.0))
    assert torch.equal(exact, allowed)
    levels = np.asarray(Image.open(folder / "one.jpg"), np.float64)
    means = levels.reshape(50, 18, 50, 24, 3).mean((1, 3))  # whole steps: plain means
    found = exact[0, 0].permute(1, 2, 0).numpy()
    assert np.abs(found - means).max() <= 0.5 + 1e-6


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
    for image in (np.array(draw_image(1, 400, 300)), noise):
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
    image = np.array(draw_image(1, 120, 110))
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


DRAWS = pytest.mark.parametrize("draw", [(0.0, 0.0), (0.999, 0.999), (0.4, 0.7)])


@DRAWS
def test_simple_resized_crop_is_torchvisions(draw):
    image = draw_image(1, 125, 94)
    cut, window = window_cut(draw, (125, 94), simple_frame(125, 94, 56))
    (view,) = views = np.empty((1, 56, 56, 3), np.uint8)
    resize_crops(np.array(image), [Views(cut, views, "bicubic")])
    resized = functional.resize(image, [56], functional.InterpolationMode.BICUBIC)
    assert resized.size == cut.scaled
    padded = functional.pad(resized, [4, 4, 4, 4], padding_mode="reflect")
    expected = functional.crop(padded, window.top + 4, window.left + 4, 56, 56)
    assert np.abs(view.astype(int) - np.asarray(expected).astype(int)).max() <= 1


@DRAWS
def test_padded_crop_is_torchvisions(draw):
    image = draw_image(1, 32, 32)
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
    image, frame = np.array(draw_image(1, 125, 94)), Frame((60, 50), (32, 32), 4, "reflect")
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
    image = np.array(draw_image(1, 125, 94))
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
