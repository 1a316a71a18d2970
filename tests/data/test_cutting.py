"""Decoding smaller: not below what a view needs, boxes on the grid, errors within tolerance."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pospre.data.crops import Cut, PixelBox
from pospre.data.cutting import _PIXELS_PER_PIXEL, choose_shrink, margin, snap
from pospre.data.loader import build_loader
from pospre.data.views import ViewGroup


def test_the_margin_grows_with_the_demand():
    assert margin(0) == float("inf") and margin(100) == 1.25
    tolerances = np.linspace(0.6, 4, 50)
    margins = [margin(tolerance) for tolerance in tolerances]
    assert margins == sorted(margins, reverse=True)


def test_the_view_that_needs_most_decides():
    view = PixelBox(0, 0, 100, 100)
    large, small = (Cut(PixelBox(0, 0, side, side), (100, 100), view) for side in (2000, 300))
    assert choose_shrink([large], 2.5) == 8
    assert choose_shrink([large, small], 1.5) == 2
    assert choose_shrink([large, small], 2.5) == 1
    assert choose_shrink([large], float("inf")) == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_snapped_boxes_lie_inside_and_near(data):
    shrink = data.draw(st.sampled_from([2, 4, 8]))
    width, height = (data.draw(st.integers(2 * shrink, 999)) for _ in range(2))
    left, top = data.draw(st.integers(0, width - 2)), data.draw(st.integers(0, height - 2))
    box = PixelBox(
        left, top, data.draw(st.integers(1, width - left)), data.draw(st.integers(1, height - top))
    )
    small = snap(box, shrink, width, height)
    assert small.left >= 0 and small.top >= 0 and small.width > 0 and small.height > 0
    assert small.left + small.width <= width // shrink
    assert small.top + small.height <= height // shrink
    for found, wanted in zip(small, box, strict=True):
        assert abs(found * shrink - wanted) <= 1.5 * shrink


def save(folder: Path, suffix: str, image: Image.Image) -> Path:
    folder.mkdir()
    options: dict[str, Any] = {"quality": 95} if suffix == "jpg" else {}
    image.save(folder / f"one.{suffix}", **options)
    return folder


@pytest.mark.parametrize("crop", ["random", "simple", "full"])
def test_boxes_do_not_depend_on_what_can_be_decoded_smaller(tmp_path, crop):
    coarse = np.random.default_rng(3).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((1203, 901), Image.Resampling.BICUBIC)
    views = [ViewGroup(size=64, count=3, scale=(0.3, 1), crop=crop)]
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


@pytest.mark.skipif("POSPRE_TEST_DATA" not in os.environ, reason="needs real photographs")
@pytest.mark.parametrize(("tolerance", "pixels"), _PIXELS_PER_PIXEL)
def test_views_stay_within_the_tolerance(tmp_path, tolerance, pixels):
    """Views of photographs cut as large as the tolerance allows at half size, beside full size."""
    root = Path(os.environ["POSPRE_TEST_DATA"]) / "imagenet_sample"
    errors = []
    for path in sorted(root.glob("*/*.JPEG"))[::16]:
        image = Image.open(path).convert("RGB")
        side = int((min(image.size) - 1) / (2 * pixels))
        views = []
        for suffix in ("jpg", "png"):  # the boxes are the same, but a PNG is decoded in full
            folder = tmp_path / path.stem / suffix
            folder.mkdir(parents=True)
            if suffix == "jpg":
                shutil.copy(path, folder / "one.jpg")
            else:
                image.save(folder / "one.png", compress_level=1)
            views.append(only_view(folder, ViewGroup(size=side, crop="full"), tolerance))
        errors.append((views[0] - views[1]).square().mean().sqrt().item())
    assert 0.3 * tolerance < np.mean(errors) <= tolerance, np.mean(errors)


def only_view(folder: Path, group: ViewGroup, tolerance: float) -> torch.Tensor:
    loader = build_loader(
        folder, views=[group], batch_size=1, seed=0, num_workers=0, tolerance=tolerance
    )
    return next(iter(loader))["view/image"].float()
