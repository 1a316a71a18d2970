"""RandAugment gives timm's and Pillow's pixels; random erasing has timm's distribution."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data import random_erasing as timm_erasing
from timm.data.random_erasing import RandomErasing
from torchvision.transforms.v2 import functional as torchvision

from pospre import draws
from pospre.augment.device import ERASE_DRAWS, DeviceAugment, ViewDraws, erased_area
from pospre.augment.rand_augment import OPERATIONS, Choice, apply, choose, rand_augment
from pospre.data.views.augment_options import Augment, RandAugment
from tests.devices import DEVICES

# Ours, timm's name with and without "increasing".
TIMM = {
    "auto_contrast": "AutoContrast",
    "equalise": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterise": "Posterize",
    "solarise": "Solarize",
    "solarise_add": "SolarizeAdd",
    "colour": "Color",
    "contrast": "Contrast",
    "brightness": "Brightness",
    "sharpness": "Sharpness",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}
GRADED = ("posterise", "solarise", "colour", "contrast", "brightness", "sharpness")
AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
FILL = (124, 116, 104)
LEVELS = torch.tensor([0.0, 0.33, 0.8765, 1.0])


def pictures(num, height=45, width=60):
    """Smooth pictures with sharp edges, of narrow ranges of levels."""
    generator = np.random.default_rng(0)
    images = []
    for _ in range(num):
        coarse = generator.integers(20, 230, (5, 7, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.array(image)
        pixels[10:20, 15:40] = generator.integers(0, 256, 3)
        images.append(pixels)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("increasing", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_operations_are_timms(device, name, increasing, sign, monkeypatch):
    images = pictures(len(LEVELS))
    which = torch.full((len(LEVELS),), OPERATIONS.index(name))
    signs = torch.full_like(LEVELS, sign)
    choice = Choice(which.to(device), LEVELS.to(device), signs.to(device), increasing)
    ours = apply(images.float().to(device), choice, torch.tensor(FILL).float().to(device)).cpu()
    assert torch.equal(ours, ours.round()) and ours.min() >= 0 and ours.max() <= 255

    monkeypatch.setattr(timm_ops, "_randomly_negate", lambda value: sign * value)
    suffix = "Increasing" if increasing and name in GRADED else ""
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    for row, level in enumerate(LEVELS.tolist()):
        operation = timm_ops.AugmentOp(TIMM[name] + suffix, 1.0, 10 * level, hparams)
        image = Image.fromarray(images[row].permute(1, 2, 0).numpy())
        theirs = torch.from_numpy(np.array(operation(image))).permute(2, 0, 1)
        gap = (ours[row] - theirs).abs()
        # float32 against double: a level at most, but for pixels on the edge of what is inside
        assert (gap > 1).float().mean() < (0.002 if name in AFFINE else 1e-9)
        assert (gap > 0).float().mean() < 0.002


def test_names_are_the_increasing_set_of_timm():
    names = [TIMM[name] + ("Increasing" if name in GRADED else "") for name in OPERATIONS]
    assert sorted(names) == sorted(timm_ops._RAND_INCREASING_TRANSFORMS)


def test_no_operation_changes_nothing():
    images = pictures(3).float()
    nothing = Choice(torch.full((3,), -1), torch.rand(3), torch.ones(3), True)
    assert torch.equal(apply(images, nothing, torch.zeros(3)), images)


def test_flat_and_tiny_images_pass():
    for size in ((1, 1), (2, 5), (3, 3)):
        images = torch.full((len(OPERATIONS), 3, *size), 77.0)
        count = torch.arange(len(OPERATIONS))
        choice = Choice(count, torch.full((len(count),), 0.9), torch.ones(len(count)), True)
        assert torch.isfinite(apply(images, choice, torch.tensor(FILL).float())).all()


def test_choices_have_timms_distribution():
    num = 20_000
    keys = draws.sample_keys(0, 0, torch.arange(num), 0, "test")
    choice = choose(RandAugment(), draws.uniform(keys, 3), draws.normal(keys, 1)[:, 0])
    assert abs((choice.which_N < 0).float().mean() - 0.5) < 0.02
    counts = torch.bincount(choice.which_N[choice.which_N >= 0], minlength=15)
    assert (counts / num - 0.5 / 15).abs().max() < 0.005
    gauss = random.Random(0)
    theirs = np.sort([min(max(gauss.gauss(9, 0.5), 0), 10) / 10 for _ in range(num)])
    assert np.abs(np.sort(choice.level_N.numpy()) - theirs)[50:-50].max() < 0.01
    assert abs(choice.sign_N.mean()) < 0.03


def source(num):
    return ViewDraws(1, torch.zeros(num, dtype=torch.int64), torch.arange(num), 0, 1)


def test_views_have_the_same_bits_in_any_batch():
    num = 12
    images = pictures(num)[:, None]
    flips = torch.zeros(num, 1, dtype=torch.bool)
    augment = Augment(rand_augment=RandAugment(), erase_rate=0.5)
    step, every = DeviceAugment(), source(num)
    whole = step(images, flips, augment, every)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(0))
    for rows in (*order.split(5), *order.split(1)):
        part = dataclasses.replace(every, epoch=every.epoch[rows], index=every.index[rows])
        assert torch.equal(step(images[rows], flips[rows], augment, part), whole[rows])


def test_rand_augment_and_erasing_are_one_graph(whole_graph):
    images, flips = pictures(4)[:, None], torch.zeros(4, 1, dtype=torch.bool)
    augment = Augment(rand_augment=RandAugment(), erase_rate=0.5)
    step = DeviceAugment()
    compiled = whole_graph(step)
    expected = step(images, flips, augment, source(4))
    torch.testing.assert_close(compiled(images, flips, augment, source(4)), expected)


def test_as_many_operations_as_asked_for():
    images = pictures(2).float()
    inverts = (OPERATIONS.index("invert") + 0.5) / len(OPERATIONS)
    draw = torch.tensor([0.0, inverts, 0.0]).repeat(2, 3)
    thrice = rand_augment(images, RandAugment(num_ops=3), draw, torch.zeros(2, 3), torch.zeros(3))
    assert torch.equal(thrice, 255 - images)


def test_erased_areas_have_timms_distribution():
    num, height, width = 3000, 32, 24
    keys = draws.sample_keys(0, 0, torch.arange(num), 0, "test")
    ours = erased_area(draws.uniform(keys, ERASE_DRAWS), height, width)
    assert ours.shape == (num, 1, height, width)
    random.seed(0)
    torch.manual_seed(0)
    theirs = RandomErasing(1.0, mode="pixel", device="cpu")(torch.zeros(num, 1, height, width)) != 0
    # The two-sample Kolmogorov–Smirnov limit at a risk of 1e-6.
    limit = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / num)
    for measure in (
        lambda area: area.sum((1, 2, 3)),
        lambda area: area.any(3).sum((1, 2)),
        lambda area: area.any(2).sum((1, 2)),
        lambda area: area.any(3).to(torch.int64).argmax(2)[:, 0],
        lambda area: area.any(2).to(torch.int64).argmax(2)[:, 0],
    ):
        first, second = measure(ours).sort()[0], measure(theirs).sort()[0]
        values = torch.cat([first, second]).unique()
        gap = torch.searchsorted(first, values, right=True)
        gap = gap - torch.searchsorted(second, values, right=True)
        assert gap.abs().max() / num < limit


class OurDraws:
    """Gives timm's tries the numbers that ours have: area, aspect ratio, top and left of each."""

    def __init__(self, draw):
        self.tries, self.rest = iter(draw.double().view(-1, 4).tolist()), []

    def random(self):
        return 0.0

    def uniform(self, low, high):
        if len(self.rest) in (0, 2):  # the last try, if any, did not fit
            self.rest = next(self.tries)
        return low + (high - low) * self.rest.pop(0)

    def randint(self, low, high):
        return low + int(self.rest.pop(0) * (high + 1 - low))


@pytest.mark.parametrize("device", DEVICES)
def test_erased_pixels_are_those_of_timms_area_and_torchvisions_erase(device, monkeypatch):
    num, size = 48, (24, 32)
    images, flips = pictures(num, *size)[:, None], torch.zeros(num, 1, dtype=torch.bool)
    every = source(num)
    there = dataclasses.replace(every, epoch=every.epoch.to(device), index=every.index.to(device))
    step = DeviceAugment().to(device)
    given = (images.to(device), flips.to(device))
    ours = step(*given, Augment(erase_rate=1.0), there)[:, 0].cpu()
    untouched = step(*given)[:, 0].cpu()
    noise = draws.normal(every.keys("noise").flatten(), 3 * math.prod(size)).view(num, 3, *size)
    draw = every.uniform("erase", 1 + ERASE_DRAWS)[:, 1:]
    timms = RandomErasing(1.0, mode="const", device="cpu")
    monkeypatch.setattr(timm_erasing, "_get_pixels", lambda *_, **__: torch.ones(()))
    for row in range(num):
        monkeypatch.setattr(timm_erasing, "random", OurDraws(draw[row]))
        area = timms(torch.zeros(1, *size))[0].nonzero()
        (top, left), (bottom, right) = area.min(0)[0].tolist(), (area.max(0)[0] + 1).tolist()
        values = noise[row, :, top:bottom, left:right]
        sides = bottom - top, right - left
        expected = torchvision.erase(untouched[row], top, left, *sides, values)
        torch.testing.assert_close(ours[row], expected, rtol=0, atol=1e-5)


def test_erased_pixels_are_standard_normal_at_the_rate():
    num = 1500
    flips = torch.zeros(num, 1, dtype=torch.bool)
    grey = torch.full((num, 1, 3, 16, 16), 100, dtype=torch.uint8)
    step = DeviceAugment(mean=(0.0, 0.0, 0.0), std=(0.1, 0.1, 0.1))
    pixels = step(grey, flips, Augment(erase_rate=0.25), source(num)).flatten(0, 1)
    erased = pixels != pixels.flatten(1).median(dim=1)[0].view(-1, 1, 1, 1)
    assert abs(erased.flatten(1).any(1).float().mean() - 0.25) < 0.04
    noise = pixels[erased]
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
