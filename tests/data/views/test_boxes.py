"""Places in an image: inside it, distributed as torchvision's, the same bits in every library."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import CenterCrop, RandomResizedCrop

from pospre import draws, portable_math
from pospre.data.views.boxes import (
    Crops,
    Frame,
    PixelBox,
    box_crops,
    center_window,
    exp,
    hull,
    log_range,
    padded_frame,
    random_boxes,
    random_windows,
    round_half_even,
    simple_box,
    simple_frame,
)
from pospre.data.views.crop_plan import plan_views
from pospre.data.views.options import ViewGroup

SIDES = st.integers(1, 3000)
LARGE_SIDES = st.one_of(SIDES, st.integers(1, 2**20))
# Of 2 : 3 to 3 : 2, in which every draw of the usual crops finds room within ten tries.
RATIOS = st.floats(0.001, 1000)
DRAW = st.integers(0, 2**24 - 1).map(lambda word: word / 2**24)
# Three bytes are a draw, which is sooner done than forty single ones.
DRAWS = st.binary(min_size=120, max_size=120).map(
    lambda words: [int.from_bytes(words[n : n + 3]) / 2**24 for n in range(0, 120, 3)]
)
USUAL = (3 / 4, 4 / 3)
NUM = 6000


def one_box(draw, width, height, scale, ratio):
    return PixelBox(*random_boxes(np.array([draw]), (width, height), scale, ratio)[0].tolist())


def crop_draws(num=NUM):
    return draws.uniform(draws.sample_keys(0, 0, np.arange(num), 0, "crop"), 40).astype(float)


@given(draw=DRAWS, width=SIDES, height=SIDES, low=st.floats(0.001, 1), ratio=RATIOS, wider=RATIOS)
def test_boxes_lie_inside_the_image(draw, width, height, low, ratio, wider):
    ratios = (min(ratio, wider), max(ratio, wider))
    boxes = random_boxes(np.array([draw]), (width, height), (low, 1.0), ratios)
    box = PixelBox(*boxes[0].tolist())
    assert box.width >= 1 and box.height >= 1
    assert box.left >= 0 and box.left + box.width <= width
    assert box.top >= 0 and box.top + box.height <= height
    x0, y0, x1, y1 = box_crops(boxes, (width, height), (224, 224)).relative[0]
    assert 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1


def in_python(draw, width, height, scale, ratio):
    """Torchvision's ``get_params`` on given draws: ten tries, then a central box."""
    low, high = log_range(ratio)
    for start in range(0, 40, 4):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * draw[start])
        aspect = exp(low + (high - low) * draw[start + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(draw[start + 2] * (width - w + 1))
            return left, int(draw[start + 3] * (height - h + 1)), w, h
    w, h = width, height
    if width / height < ratio[0]:
        h = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = min(width, max(1, round(height * ratio[1])))
    return (width - w) // 2, (height - h) // 2, w, h


def ks_limit(num, risk=1e-6):
    """The two-sample Kolmogorov-Smirnov limit."""
    return math.sqrt(-math.log(risk / 2) / 2) * math.sqrt(2 / num)


def ks_distance(first, second):
    first, second = np.sort(first), np.sort(second)
    values = np.union1d(first, second)
    gap = np.searchsorted(first, values, "right") - np.searchsorted(second, values, "right")
    return np.abs(gap).max() / len(first)


def measures(boxes, width, height):
    left, top, across, down = boxes.T
    room_x, room_y = width - across, height - down
    return {
        "left": left,
        "top": top,
        "width": across,
        "height": down,
        "area": across * down,
        "aspect": across / down,
        "place across": np.where(room_x > 0, left / np.maximum(room_x, 1), 0.5),
        "place down": np.where(room_y > 0, top / np.maximum(room_y, 1), 0.5),
    }


@pytest.mark.parametrize(
    ("size", "scale"),
    [((500, 375), (0.08, 1.0)), ((333, 500), (0.2, 1.0)), ((640, 100), (0.08, 1.0))],
)
def test_distribution_is_torchvisions(size, scale):
    """A fifth of the boxes of 640 × 100 are those after ten tries."""
    ours = random_boxes(crop_draws(), size, scale, USUAL)
    torch.manual_seed(0)
    image = torch.empty(1, size[1], size[0])
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(scale), list(USUAL)) for _ in range(NUM)]
    )[:, [1, 0, 3, 2]]  # top, left, height, width → left, top, width, height
    expected = measures(theirs, *size)
    for name, values in measures(ours, *size).items():
        assert ks_distance(values, expected[name]) < ks_limit(NUM), name
    bins = [np.linspace(0, size[0], 5), np.linspace(0, size[1], 5)]
    middles = [boxes[:, :2] + boxes[:, 2:] / 2 for boxes in (ours, theirs)]
    first, second = (np.histogramdd(middle, bins=bins)[0] for middle in middles)
    used = first + second > 0
    chi_square = ((first - second)[used] ** 2 / (first + second)[used]).sum()
    assert chi_square < used.sum() + 6 * math.sqrt(2 * used.sum())


@given(
    draw=DRAWS,
    image=st.tuples(LARGE_SIDES, LARGE_SIDES),
    low=st.floats(0.001, 1),
    ratio=st.tuples(RATIOS, RATIOS).map(sorted).map(tuple),
)
def test_boxes_are_the_stated_formulas_to_the_bit(draw, image, low, ratio):
    (width, height), scale = image, (low, 1.0)
    expected = in_python(draw, width, height, scale, ratio)
    assert one_box(draw, width, height, scale, ratio) == expected


@given(draw=st.tuples(DRAW, DRAW), width=LARGE_SIDES, height=LARGE_SIDES, side=st.integers(1, 600))
def test_windows_reach_no_further_than_their_frame_says(draw, width, height, side):
    for frame in (simple_frame(width, height, side), padded_frame((side, 2 * side))):
        window = window_at(frame, *draw)
        for start, length, scaled, u in zip(
            window[:2], window[2:], frame.scaled, draw, strict=True
        ):
            places = scaled + 2 * frame.padding - length + 1
            assert start == math.floor(u * places) - frame.padding
            assert -frame.padding <= start <= scaled + frame.padding - length


@given(
    draw=st.lists(DRAW, min_size=4, max_size=4), width=SIDES, height=SIDES, side=st.integers(8, 300)
)
def test_relative_boxes_are_the_same_one_by_one(draw, width, height, side):
    frame = simple_frame(width, height, side)
    windows = random_windows(np.array(draw).reshape(2, 2), frame)
    boxes = np.array([[0, 0, width, height], [width // 2, 0, width - width // 2, height]])
    crops = Crops(boxes, frame.scaled, windows, (width, height), frame.edge)
    assert crops.relative.dtype == np.float32
    for box, window, found in zip(boxes.tolist(), windows.tolist(), crops.relative, strict=True):
        for side, size in ((0, width), (1, height)):
            scale = box[2 + side] / frame.scaled[side]
            ends = window[side], window[side] + window[2 + side]
            wanted = [(box[side] + end * scale) / size for end in ends]
            assert np.abs(found[[side, 2 + side]] - wanted).max() < 1e-6


def test_the_exponential_is_accurate():
    values = np.linspace(-8, 8, 9_001).tolist() + np.random.default_rng(0).normal(size=999).tolist()
    errors = [abs(exp(value) / math.exp(value) - 1) for value in values]
    assert max(errors) < 2.0**-46 and exp(0.0) == 1


@given(ratio=RATIOS)
def test_logarithms_are_right(ratio):
    low, high = log_range((ratio, 2.0))
    assert math.isclose(low, math.log(ratio), rel_tol=2**-52, abs_tol=2.0**-60)
    assert high == math.log(2)


@given(value=st.one_of(st.floats(0, 2**40), st.integers(0, 2**24).map(lambda half: half / 2)))
def test_rounding_is_pythons(value):
    assert round_half_even(value) == round(value)


def test_where_nothing_can_be_stored_the_functions_are_compiled_at_every_start():
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"}
    command = "from pospre.portable_math import *; print(view_draws(1, 2, 3, (4, 1), 1).item())"
    done = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == portable_math.view_draws(1, 2, 3, (4, 1), 1).item()


@given(width=SIDES, height=SIDES)
def test_the_centre_view_is_torchvisions(width, height):
    scaled, window = center_window(width, height, (224, 224))
    assert min(scaled) == 256 and scaled == (
        (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    )
    rows, columns = torch.arange(scaled[1])[:, None], torch.arange(scaled[0])[None]
    places = [part.expand(1, *scaled[::-1]) for part in (rows, columns)]
    corner = [int(CenterCrop(224)(part)[0, 0, 0]) for part in places]
    assert [window.top, window.left] == corner and window[2:] == (224, 224)


@given(width=SIDES, height=SIDES, size=st.tuples(st.integers(8, 256), st.integers(8, 256)))
def test_centre_windows_of_other_shapes_lie_inside(width, height, size):
    scaled, window = center_window(width, height, size)
    assert 0 <= window.left <= scaled[0] - size[1] and 0 <= window.top <= scaled[1] - size[0]
    margins = (scaled[0] - int(size[1] * 256 / 224), scaled[1] - int(size[0] * 256 / 224))
    assert min(margins) == 0


def window_at(frame, across, down):
    return PixelBox(*random_windows(np.array([[across, down]]), frame)[0].tolist())


def test_golden_frames():
    """LUT's crop: 500×375 → 298×224, offsets 0–82 × 0–8 with 4 of padding; and the padded one."""
    frame = simple_frame(500, 375, 224)
    assert frame == Frame((298, 224), (224, 224), 4, "reflect")
    assert window_at(frame, 0.0, 0.0) == PixelBox(-4, -4, 224, 224)
    assert window_at(frame, 1 - 2**-24, 1 - 2**-24)[:2] == (82 - 4, 8 - 4)
    assert simple_frame(375, 500, 224).scaled == (224, 298)
    assert padded_frame((32, 32)) == Frame((32, 32), (32, 32), 4, "black")


@given(st.lists(st.tuples(SIDES, SIDES, SIDES, SIDES), min_size=1, max_size=9))
def test_the_hull_is_the_smallest_box_around_all(boxes):
    every = np.array(boxes)
    ends = every[:, :2] + every[:, 2:]
    assert hull(every) == (*every[:, :2].min(axis=0), *ends.max(axis=0))


def test_very_thin_images_are_not_blown_up():
    assert simple_box(400, 300) == (0, 0, 400, 300) and simple_box(50, 400) == (0, 0, 50, 400)
    assert simple_box(4000, 1) == (1996, 0, 8, 1) and simple_box(3, 900) == (0, 438, 3, 24)
    (plan,) = plan_views([ViewGroup(crop="simple", count=2)], seed=0, epoch=0, index=np.array([3]))
    crops = plan.crops(0, 4000, 1)
    assert crops.scaled == (8 * 224, 224)
    assert (crops.relative[:, [0, 2]] > 0.49).all() and (crops.relative[:, [0, 2]] < 0.51).all()
