"""The colours of a view, planned again in numpy from the documented draws: the same bits."""

import dataclasses

import numpy as np
import pytest
import torch

from pospre import draws, portable_math
from pospre.augment import colour, rand_augment
from pospre.augment import device as device_step
from pospre.augment.device import DeviceAugment, ViewDraws
from pospre.data.views.augment_options import Augment, RandAugment

SEED, FIRST, COUNT = -3, 4, 2
EPOCHS = np.array([0, 7, 7, 2**40, 1, 3, 3, 5])
SAMPLES = np.array([5, 5, 6, 10**12, 0, 1, 2, 3])
SIZE = 16
JITTER, SIGMA, RATES = (0.4, 0.3, 0.2, 0.1), (0.1, 2.0), (0.3, 0.6)
AUGMENT = Augment(
    jitter=JITTER,
    jitter_rate=RATES,
    grayscale_rate=0.2,
    blur_rate=RATES,
    blur_sigma=SIGMA,
    solarize_rate=0.7,
    erase_rate=0.5,
)
MAGNITUDE, SPREAD = 9.0, 0.5
RAND = Augment(rand_augment=RandAugment(num_ops=2, magnitude=MAGNITUDE, magnitude_std=SPREAD))


def keys(purpose):
    """The keys of all views, (B·V,), as the plan says."""
    views = FIRST + np.arange(COUNT)
    table = draws.sample_keys(SEED, EPOCHS[:, None], SAMPLES[:, None], views, f"augment/{purpose}")
    return table.flatten()


def uniform(purpose, count):
    return draws.uniform(keys(purpose), count)


def source(rows=slice(None), first=FIRST, count=COUNT):
    return ViewDraws(
        SEED, torch.from_numpy(EPOCHS[rows]), torch.from_numpy(SAMPLES[rows]), first, count
    )


def below(draw, rate):
    rates = np.array(rate if isinstance(rate, tuple) else (rate,) * COUNT, np.float32)
    return draw < np.tile(rates, len(draw) // COUNT)


def carried_out(monkeypatch, augment, views):
    """What the device step does with which parameters, by name, for each of the views (B·V,)."""
    found = {}

    def record(name, *values):
        found[name] = [value.clone() for value in values]

    def everywhere(images, chosen, change):  # parameters of the views left alone are seen too
        name = f"chosen {sum(key.startswith('chosen') for key in found)}"
        record(name, chosen)
        change(images, slice(None))
        return images

    def jitter(levels, factors, turns, order):
        record("jitter", factors, turns, order)
        return levels

    def blur(levels, sigma, kernel):
        record("blur", sigma)
        return levels

    def erased_area(draw, height, width):
        record("erase", draw)
        return torch.zeros(len(draw), 1, height, width, dtype=torch.bool)

    def operations(levels, options, draw, normal, fill):
        choices = [
            rand_augment.choose(options, draw[:, 3 * place : 3 * place + 3], normal[:, place])
            for place in range(options.num_ops)
        ]
        for place, choice in enumerate(choices):
            record(f"rand {place}", choice.which_N, choice.level_N, choice.sign_N)
        return levels

    with monkeypatch.context() as patched:
        patched.setattr(device_step, "change_some", everywhere)
        patched.setattr(colour, "jitter", jitter)
        patched.setattr(colour, "blur", blur)
        patched.setattr(device_step, "erased_area", erased_area)
        patched.setattr(device_step, "rand_augment", operations)
        num = len(views.index)
        images = torch.zeros(num, views.count, 3, SIZE, SIZE, dtype=torch.uint8)
        flips = torch.zeros(num, views.count, dtype=torch.bool)
        DeviceAugment()(images, flips, augment, views)
    return found


@pytest.mark.parametrize(
    "purpose", ["jitter", "jitter_order", "colour", "erase", "rand", "rand_magnitude"]
)
def test_numpys_and_numbas_draws_are_the_devices(purpose):
    ours, theirs = uniform(purpose, 41), source().uniform(purpose, 41)
    assert np.array_equal(ours, theirs.numpy()) and ours.dtype == np.float32
    start = draws.start_word(SEED, f"augment/{purpose}")
    compiled = [
        portable_math.view_draws(start, epoch, sample, (FIRST, COUNT), 41)
        for epoch, sample in zip(EPOCHS, SAMPLES, strict=True)
    ]
    assert np.array_equal(np.concatenate(compiled), ours)


def test_numpy_plans_the_same_colours(monkeypatch):
    found = carried_out(monkeypatch, AUGMENT, source())
    draw = uniform("jitter", 5)
    centred = (2 * draw[:, :4] - 1) * np.array(JITTER, np.float32)
    factors, turns, order = (value.numpy() for value in found["jitter"])
    assert np.array_equal(factors, 1 + centred[:, :3]) and np.array_equal(turns, centred[:, 3])
    assert np.array_equal(order, draws.permutation(keys("jitter_order"), 4))
    jittered, grey, blurred, solarised, erased = (
        found[f"chosen {place}"][0].numpy() for place in range(5)
    )
    assert np.array_equal(jittered, below(draw[:, 4], RATES))
    draw = uniform("colour", 4)
    assert np.array_equal(grey, below(draw[:, 0], 0.2))
    assert np.array_equal(blurred, below(draw[:, 1], RATES))
    assert np.array_equal(solarised, below(draw[:, 2], 0.7))
    low, high = SIGMA
    assert np.array_equal(found["blur"][0].numpy(), low + (high - low) * draw[:, 3])
    draw = uniform("erase", 41)
    assert np.array_equal(erased, below(draw[:, 0], 0.5))
    assert np.array_equal(found["erase"][0].numpy(), draw[:, 1:])


def test_numpy_plans_the_same_choice_of_three(monkeypatch):
    found = carried_out(monkeypatch, Augment(three_augment=True), source())
    choice = (uniform("colour", 4)[:, 0] * 3).astype(np.int64)  # grey, blurred, solarised
    for place in range(3):
        assert np.array_equal(found[f"chosen {place}"][0].numpy(), choice == place)


def test_numpy_plans_the_same_operations(monkeypatch):
    found = carried_out(monkeypatch, RAND, source())
    draw, normal = uniform("rand", 6), draws.normal(keys("rand_magnitude"), 2)
    for place in range(2):
        whether, operation, sign = draw[:, 3 * place : 3 * place + 3].T
        which = np.where(whether < 0.5, (operation * 15).astype(np.int64), -1)
        level = np.clip(MAGNITUDE + SPREAD * normal[:, place], 0, 10) / 10
        one, other, third = (value.numpy() for value in found[f"rand {place}"])
        assert np.array_equal(one, which) and np.array_equal(third, np.where(sign < 0.5, -1, 1))
        np.testing.assert_allclose(other, level, atol=1e-6)  # logarithm and cosine are libraries'


@pytest.mark.parametrize("augment", [AUGMENT, RAND], ids=["colours", "rand"])
def test_a_views_parameters_do_not_depend_on_its_batch(monkeypatch, augment):
    whole = carried_out(monkeypatch, augment, source())
    for rows in ([3], [7, 0], [6, 5, 4, 2]):
        some = carried_out(monkeypatch, augment, source(rows))
        for name, values in whole.items():
            for all_of_them, ours in zip(values, some[name], strict=True):
                expected = all_of_them.unflatten(0, (-1, COUNT))[rows].flatten(0, 1)
                assert torch.equal(ours, expected), name


def test_a_views_parameters_do_not_depend_on_its_group(monkeypatch):
    """A view of the second group is the same when it is a group of its own."""
    even = dataclasses.replace(AUGMENT, jitter_rate=0.3, blur_rate=0.3)
    whole = carried_out(monkeypatch, even, source())
    alone = carried_out(monkeypatch, even, source(first=FIRST + 1, count=1))
    for name, values in whole.items():
        for both, ours in zip(values, alone[name], strict=True):
            assert torch.equal(ours, both.unflatten(0, (-1, COUNT))[:, 1]), name
