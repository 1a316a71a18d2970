"""Boxes and flips: inside the image, distributed as torchvision's, pure functions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from pospre.data.crops import (
    Cut,
    PixelBox,
    center_box,
    padded_cut,
    random_box,
    simple_cut,
    whole_cut,
)
from pospre.data.views import ViewGroup, plan_views
from pospre.errors import UserError

DRAWS = st.lists(st.integers(0, 2**24 - 1).map(lambda word: word / 2**24), min_size=40, max_size=40)
SIDES = st.integers(1, 3000)
RATIOS = st.floats(0.05, 20)


@given(draw=DRAWS, width=SIDES, height=SIDES, low=st.floats(0.001, 1), ratio=RATIOS, wider=RATIOS)
def test_boxes_lie_inside_the_image(draw, width, height, low, ratio, wider):
    ratios = (min(ratio, wider), max(ratio, wider))
    box = random_box(draw, width, height, (low, 1.0), ratios)
    assert box.width >= 1 and box.height >= 1
    assert box.left >= 0 and box.left + box.width <= width
    assert box.top >= 0 and box.top + box.height <= height
    x0, y0, x1, y1 = whole_cut(box, (224, 224)).relative(width, height)
    assert 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1


@given(draw=DRAWS, width=st.integers(100, 2000), height=st.integers(100, 2000))
def test_area_and_aspect_keep_their_ranges(draw, width, height):
    assume(2 / 3 < width / height < 3 / 2)  # every draw then finds room within ten tries
    scale, ratio = (0.2, 0.5), (3 / 4, 4 / 3)
    box = random_box(draw, width, height, scale, ratio)
    rounding = 1 + 2 / min(box.width, box.height)
    area = box.width * box.height / (width * height)
    assert scale[0] / rounding <= area <= scale[1] * rounding
    assert ratio[0] / rounding <= box.width / box.height <= ratio[1] * rounding


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1000, 10, PixelBox(493, 0, 13, 10)),  # too wide: the widest box of ratio 4/3
        (10, 1000, PixelBox(0, 493, 10, 13)),
        (1, 1, PixelBox(0, 0, 1, 1)),
    ],
)
def test_after_ten_tries_a_central_box(width, height, expected):
    assert random_box([0.99] * 40, width, height, (0.9, 1.0), (3 / 4, 4 / 3)) == expected


def test_the_eleventh_try_is_never_needed_or_made():
    fails, fits = [0.999, 0.999, 0, 0], [0.0, 0.5, 0.5, 0.5]
    for num_fails in range(10):
        draw = fails * num_fails + fits * (10 - num_fails)
        box = random_box(draw, 100, 100, (0.25, 1.0), (3 / 4, 4 / 3))
        assert box == PixelBox(25, 25, 50, 50)


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (640, 100)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0)])
def test_distribution_is_torchvisions(size, scale):
    width, height = size
    num = 3000
    (plan,) = plan_views([ViewGroup(scale=scale)], seed=0, epoch=0, index=np.arange(num))
    ours = np.array([plan.cut(sample, 0, width, height).box for sample in range(num)])
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(num)]
    )[:, [1, 0, 3, 2]]  # top, left, height, width → left, top, width, height
    both = [np.column_stack([boxes, boxes[:, 2] * boxes[:, 3]]) for boxes in (ours, theirs)]
    # The two-sample Kolmogorov–Smirnov limit at a risk of 1e-6.
    limit = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / num)
    for column in range(5):
        first, second = np.sort(both[0][:, column]), np.sort(both[1][:, column])
        values = np.union1d(first, second)
        gap = np.searchsorted(first, values, "right") - np.searchsorted(second, values, "right")
        assert np.abs(gap).max() / num < limit


def test_draws_depend_on_sample_epoch_seed_and_view_only():
    group = ViewGroup(count=2)
    index = np.array([5, 3, 9])
    (plan,) = plan_views([group], seed=1, epoch=2, index=index)
    (alone,) = plan_views([group], seed=1, epoch=2, index=index[1:2])
    assert np.array_equal(plan.crop_draws[1], alone.crop_draws[0])
    assert np.array_equal(plan.flips[1], alone.flips[0])
    for seed, epoch in ((2, 2), (1, 3)):
        (other,) = plan_views([group], seed=seed, epoch=epoch, index=index)
        assert not (other.crop_draws == plan.crop_draws).any()
    assert not (plan.crop_draws[:, 0] == plan.crop_draws[:, 1]).any()


def test_views_are_numbered_through_all_groups():
    index = np.arange(4)
    together = plan_views(
        [ViewGroup(name="global"), ViewGroup(name="local", count=2)], seed=0, epoch=0, index=index
    )
    (three,) = plan_views([ViewGroup(count=3)], seed=0, epoch=0, index=index)
    drawn = np.concatenate([plan.crop_draws for plan in together], axis=1)
    assert np.array_equal(drawn, three.crop_draws)


@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_flips_have_their_rate(rate):
    (plan,) = plan_views([ViewGroup(flip_rate=rate)], seed=0, epoch=0, index=np.arange(10_000))
    assert abs(plan.flips.mean() - rate) < 0.02


@given(width=SIDES, height=SIDES)
def test_center_box_is_the_central_square(width, height):
    box = center_box(width, height)
    assert box.width == box.height == max(1, round(min(width, height) * 7 / 8))
    assert abs(2 * box.left + box.width - width) <= 1
    assert abs(2 * box.top + box.height - height) <= 1


def test_center_views_are_never_flipped():
    (plan,) = plan_views([ViewGroup(crop="center")], seed=0, epoch=0, index=np.arange(50))
    assert plan.flips.shape == (50, 1) and not plan.flips.any()
    assert plan.cut(0, 0, 512, 256).box == center_box(512, 256) == PixelBox(144, 16, 224, 224)


@given(width=SIDES, height=SIDES)
def test_center_boxes_of_other_shapes_keep_the_shape(width, height):
    box = center_box(width, height, (100, 40))
    assert box.width <= width and box.height <= height
    assert abs(box.width / 40 - box.height / 100) <= 1 / 40


def test_simple_resized_crop_of_a_photograph():
    """The golden numbers of LUT's crop: 500×375 → 298×224, offsets 0–82 × 0–8 with 4 of padding."""
    corner = simple_cut([0.0, 0.0], 500, 375, 224)
    assert corner == Cut(
        PixelBox(0, 0, 500, 375), (298, 224), PixelBox(-4, -4, 224, 224), "reflect"
    )
    last = simple_cut([1 - 2**-24, 1 - 2**-24], 500, 375, 224)
    assert last.window[:2] == (82 - 4, 8 - 4)
    assert simple_cut([0.0, 0.0], 375, 500, 224).scaled == (224, 298)
    offsets = [simple_cut([step / 1000, 0.5], 500, 375, 224).window.left for step in range(1000)]
    assert sorted(set(offsets)) == list(range(-4, 79))
    assert min(offsets.count(place) for place in set(offsets)) >= 12


def test_a_view_over_the_edge_says_where_its_own_pixels_are():
    x0, y0, x1, y1 = simple_cut([0.0, 0.999], 448, 448, 224).relative(448, 448)
    assert (x0, y0, x1, y1) == (-4 / 224, 4 / 224, 220 / 224, 228 / 224)


def test_padded_crop_of_a_small_image():
    cuts = [padded_cut([x / 9, y / 9], 32, 32, (32, 32)) for x in range(9) for y in range(9)]
    assert {cut.window[:2] for cut in cuts} == {(x, y) for x in range(-4, 5) for y in range(-4, 5)}
    assert cuts[0].edge == "black" and cuts[40].window == PixelBox(0, 0, 32, 32)


def test_a_full_view_is_the_whole_image():
    (plan,) = plan_views(
        [ViewGroup(crop="full", size=(10, 20))], seed=0, epoch=0, index=np.arange(50)
    )
    cut = plan.cut(0, 0, 333, 222)
    assert cut.is_whole and cut.scaled == (20, 10)
    assert cut.relative(333, 222) == (0, 0, 1, 1)
    assert 10 < plan.flips.sum() < 40


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"size": 0}, "size is 0"),
        ({"count": 0}, "count is 0"),
        ({"scale": (0.5, 0.2)}, "scale is"),
        ({"scale": (0.0, 1.0)}, "scale is"),
        ({"ratio": (2.0, 1.0)}, "ratio is"),
        ({"flip_rate": 1.5}, "flip_rate is 1.5"),
        ({"interpolation": "bicubik"}, "Did you mean 'bicubic'"),
        ({"crop": "middle"}, "crop 'middle' is unknown"),
        ({"size": (32, 0)}, "size is 0"),
        ({"crop": "simple", "size": (32, 16)}, "'simple' cuts squares, but size is"),
    ],
)
def test_wrong_settings_are_refused(wrong, said):
    with pytest.raises(UserError, match=said):
        ViewGroup(**wrong)
