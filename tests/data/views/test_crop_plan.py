"""Boxes and flips of a batch: pure functions of seed, epoch, sample and view."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pospre import draws, portable_math
from pospre.data.views.augment_options import Augment, RandAugment
from pospre.data.views.boxes import (
    center_window,
    padded_frame,
    random_boxes,
    random_windows,
    simple_frame,
)
from pospre.data.views.crop_plan import plan_flips, plan_views
from pospre.data.views.options import CROPS, ViewGroup, named_groups
from pospre.errors import UserError

WORDS = st.integers(-(2**63), 2**63 - 1)
LARGE = 40_000, 30_000  # pixels: no two boxes share a side by chance


def test_draws_depend_on_sample_epoch_seed_and_view_only():
    group = ViewGroup(count=2)
    index = np.array([5, 3, 9])
    (plan,) = plan_views([group], seed=1, epoch=2, index=index)
    (alone,) = plan_views([group], seed=1, epoch=2, index=index[1:2])
    boxes = plan.crops(1, *LARGE).boxes
    assert np.array_equal(boxes, alone.crops(0, *LARGE).boxes)
    assert np.array_equal(plan.flips[1], alone.flips[0])
    for seed, epoch in ((2, 2), (1, 3)):
        (other,) = plan_views([group], seed=seed, epoch=epoch, index=index)
        assert not (other.crops(1, *LARGE).boxes == boxes).any()
    assert not (boxes[0] == boxes[1]).any()
    assert not (plan.crops(0, *LARGE).boxes == boxes).any()


def test_samples_may_have_epochs_of_their_own():
    index, epochs = np.array([5, 3, 9]), np.array([7, 1, 7])
    (plan,) = plan_views([ViewGroup(count=3)], seed=1, epoch=epochs, index=index)
    for sample, epoch in enumerate(epochs.tolist()):
        (alone,) = plan_views([ViewGroup(count=3)], seed=1, epoch=epoch, index=index)
        assert np.array_equal(plan.crops(sample, *LARGE).boxes, alone.crops(sample, *LARGE).boxes)
        assert np.array_equal(plan.flips[sample], alone.flips[sample])


@pytest.mark.parametrize("crop", CROPS)
def test_cuts_are_those_of_the_documented_draws(crop):
    """The plan from nothing but ``pospre.draws``, of numpy and of torch, and the formulas."""
    group, index = ViewGroup(crop=crop, count=3, size=32), np.array([4, 10**12])
    before, plan = plan_views([ViewGroup(name="a", count=2), group], seed=-5, epoch=9, index=index)
    assert before.group.name == "a"
    keys = draws.sample_keys(-5, 9, index[:, None], 2 + np.arange(3), "crop")
    tables = {count: draws.uniform(keys, count).astype(float) for count in (2, 40)}
    for count, table in tables.items():
        assert np.array_equal(table, draws.uniform(torch.from_numpy(keys), count).double().numpy())
    frame = None
    for sample in range(2):
        crops = plan.crops(sample, 90, 70)
        whole, windows = np.tile([0, 0, 90, 70], (3, 1)), None
        if crop == "random":
            whole = random_boxes(tables[40][sample], (90, 70), group.scale, group.ratio)
        elif crop == "center":
            scaled, window = center_window(90, 70, (32, 32))
            windows = np.tile(window, (3, 1))
            assert crops.scaled == scaled == (46, 36)
        elif crop in ("simple", "pad"):
            frame = simple_frame(90, 70, 32) if crop == "simple" else padded_frame((32, 32))
            windows = random_windows(tables[2][sample], frame)
            assert (crops.scaled, crops.edge) == (frame.scaled, frame.edge)
        assert np.array_equal(crops.boxes, whole)
        np.testing.assert_equal(crops.windows, windows)  # None too


@given(seed=st.integers(-(2**70), 2**70), epoch=WORDS, index=WORDS, rate=st.floats(0, 1))
def test_flips_have_the_same_bits_in_numpy_torch_and_numba(seed, epoch, index, rate):
    group, views = ViewGroup(count=3, flip_rate=rate), np.arange(3)
    words = np.array([epoch]), np.array([index]), views
    in_numpy = plan_flips(seed, words[0], words[1], words[2], group)
    tensors = [torch.from_numpy(word) for word in words]
    in_torch = plan_flips(seed, tensors[0], tensors[1], tensors[2], group)
    assert np.array_equal(in_numpy, in_torch.numpy())
    start = draws.start_word(seed, "flip")
    compiled = portable_math.view_draws(start, epoch, index, (0, 3), 1)[:, 0]
    assert (compiled < np.float32(rate)).tolist() == in_numpy[0].tolist()


def test_center_views_are_never_flipped():
    (plan,) = plan_views([ViewGroup(crop="center")], seed=0, epoch=0, index=np.arange(50))
    assert plan.flips.shape == (50, 1) and not plan.flips.any()
    crops = plan.crops(0, 512, 256)
    assert crops.boxes.tolist() == [[0, 0, 512, 256]] and crops.windows is not None
    assert crops.windows.tolist() == [[144, 16, 224, 224]] and crops.scaled == (512, 256)
    thin = plan.crops(0, 4000, 1)  # not 4000 times as wide as it needs to be
    assert thin.boxes.tolist() == [[1996, 0, 8, 1]] and thin.scaled == (2048, 256)


def test_a_full_view_is_the_whole_image():
    (plan,) = plan_views(
        [ViewGroup(crop="full", size=(10, 20))], seed=0, epoch=0, index=np.arange(50)
    )
    crops = plan.crops(0, 333, 222)
    assert crops.windows is None and crops.scaled == (20, 10)
    assert crops.relative.tolist() == [[0, 0, 1, 1]]
    assert 10 < plan.flips.sum() < 40


@given(
    index=WORDS,
    size=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    outer=st.sampled_from([{"crop": "full"}, {}, {"count": 3}]),
    low=st.floats(0.01, 1),
)
def test_views_inside_of_others_lie_there(index, size, outer, low):
    groups = [ViewGroup(name="query", count=3, inside="view", scale=(low, 1.0)), ViewGroup(**outer)]
    inner, around = plan_views(groups, seed=0, epoch=0, index=np.array([index]))
    boxes, within = inner.crops(0, *size), around.crops(0, *size)
    low_side, high_side = boxes.relative[:, :2], boxes.relative[:, 2:]
    assert (low_side >= within.relative[:, :2]).all()
    assert (high_side <= within.relative[:, 2:]).all()
    assert (boxes.boxes[:, 2:] > 0).all()
    for view in range(3):  # as if that box were the whole image
        left, top, width, height = within.boxes[view % len(within.boxes)].tolist()
        (whole,) = plan_views(
            [ViewGroup(count=3, scale=(low, 1.0))], seed=0, epoch=0, index=np.array([index])
        )
        own = whole.crops(0, width, height).boxes[view] + [left, top, 0, 0]
        assert np.array_equal(boxes.boxes[view], own)


def test_a_group_of_another_has_its_boxes_and_flips_and_draws_nothing():
    source = ViewGroup(name="global", count=2, size=32)
    last = ViewGroup(name="local", count=3, size=16)
    groups = named_groups([ViewGroup(name="anchor", of="global", size=64), source, last])
    index = np.array([5, 6])
    anchor, own, local = plan_views([*groups.values()], seed=3, epoch=1, index=index)
    plain = plan_views([source, last], seed=3, epoch=1, index=index)
    crops, same = anchor.crops(1, 90, 70), own.crops(1, 90, 70)
    assert crops.scaled == (64, 64) and same.scaled == (32, 32) and groups["anchor"].count == 2
    assert np.array_equal(crops.boxes, same.boxes)
    assert np.array_equal(anchor.flips, own.flips)
    for with_anchor, without in zip((own, local), plain, strict=True):
        found, expected = (each.crops(0, 90, 70).boxes for each in (with_anchor, without))
        assert np.array_equal(found, expected)
        assert np.array_equal(with_anchor.flips, without.flips)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"of": "none"}, "of = none, but groups with crops of their own are: view, tall"),
        ({"of": "anchor"}, "of = anchor, but groups with crops"),
        ({"of": "tall"}, r"size \[64, 64\] has another shape than \[32, 16\]"),
        ({"of": "cut"}, "crop = center, which cuts from a resized image"),
        ({"of": "view", "count": 3}, "has 1 views; leave out count = 3"),
        ({"of": "view", "scale": (0.1, 1.0)}, r"scale = \[0.1, 1.0\] has no effect with of = view"),
        ({"of": "view", "augment": {"blur_rate": 1.0}}, "augment = .* has no effect with of"),
    ],
)
def test_a_group_of_another_takes_nothing_of_its_own(options, said):
    others = [
        *(ViewGroup(), ViewGroup(name="tall", size=(32, 16))),
        ViewGroup(name="cut", crop="center"),
    ]
    with pytest.raises(UserError, match=said):
        named_groups([*others, ViewGroup(**{"name": "anchor", "size": 64, **options})])


def test_options_of_pixels_are_taken_as_a_recipe_has_them():
    values: Any = {"jitter": [0.4, 0.4, 0.2, 0.1], "rand_augment": {"magnitude": 5.0}}
    made = Augment(jitter=(0.4, 0.4, 0.2, 0.1), rand_augment=RandAugment(magnitude=5.0))
    assert ViewGroup(augment=values) == ViewGroup(augment=made)
