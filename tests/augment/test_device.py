"""Colours on the device: torchvision's results, the stated rates, the same bits in any batch."""

import dataclasses
from collections import Counter

import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from pospre.augment import colour
from pospre.augment.device import DeviceAugment, ViewDraws, change_colours
from pospre.data.views.augment_options import Augment, RandAugment
from pospre.data.views.options import ViewGroup
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.recipe.inputs import Augment as Section
from pospre.recipe.recipe import recipe_from_dict
from pospre.training.data import build_views
from tests.devices import DEVICES

JITTER = (0.4, 0.4, 0.2, 0.1)
EVERYTHING = Augment(
    jitter=JITTER, grayscale_rate=0.2, blur_rate=(0.0, 0.9), solarize_rate=(0.0, 0.2)
)  # fmt: skip


def pixels(num=6, size=24, count=2):
    generator = torch.Generator().manual_seed(0)
    smooth = torch.rand(num * count, 3, 7, 7, generator=generator)
    images = torch.nn.functional.interpolate(smooth, size=(size, size), mode="bicubic")
    return (images.clamp(0, 1) * 255).to(torch.uint8).unflatten(0, (num, count))


def source(num=6, count=2, first=0, device="cpu"):
    epoch, index = torch.full((num,), 2), torch.arange(num) * 7 + 1
    return ViewDraws(3, epoch.to(device), index.to(device), first, count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_jitter_is_torchvisions(order, device):
    levels = pixels().flatten(0, 1).float()
    num = len(levels)
    generator = torch.Generator().manual_seed(1)
    factors = 0.2 + 1.6 * torch.rand(num, 3, generator=generator)
    turns = torch.rand(num, generator=generator) - 0.5
    turns[2] = 0.0
    given = (levels, factors, turns, torch.tensor(order).expand(num, 4))
    ours = colour.jitter(*(tensor.to(device) for tensor in given)).cpu()
    for row in range(num):
        image = levels[row] / 255
        for operation in order:
            if operation == 0:
                image = reference.adjust_brightness(image, factors[row, 0].item())
            elif operation == 1:
                image = reference.adjust_contrast(image, factors[row, 1].item())
            elif operation == 2:
                image = reference.adjust_saturation(image, factors[row, 2].item())
            else:
                image = reference.adjust_hue(image, turns[row].item())
        torch.testing.assert_close(ours[row] / 255, image, rtol=0, atol=2e-5)


def test_jitter_of_whole_levels_differs_by_rounding_only():
    levels = pixels().flatten(0, 1)
    factors = torch.tensor([[1.3, 0.7, 1.2]]).expand(len(levels), 3)
    order = torch.arange(4).expand(len(levels), 4)
    ours = colour.jitter(levels.float(), factors, None, order)
    image = reference.adjust_brightness(levels, 1.3)
    image = reference.adjust_saturation(reference.adjust_contrast(image, 0.7), 1.2)
    assert (ours - image.float()).abs().max() < 4


@pytest.mark.parametrize("device", DEVICES)
def test_blur_and_grey_and_solarise_are_torchvisions(device):
    levels = pixels().flatten(0, 1)
    sigma = torch.linspace(0.1, 2.0, len(levels))
    ours = colour.blur(levels.float().to(device), sigma.to(device), 9).cpu()
    for row, width in enumerate(sigma.tolist()):
        expected = reference.gaussian_blur(levels[row] / 255, [9, 9], [width, width])
        torch.testing.assert_close(ours[row] / 255, expected, rtol=0, atol=2e-6)
    grey = reference.rgb_to_grayscale(levels / 255, 3)
    ours = colour.grey(levels.float().to(device)).cpu() / 255
    torch.testing.assert_close(ours, grey, rtol=0, atol=2e-6)
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    ours = colour.solarise(every.float().to(device), 128).cpu()
    assert torch.equal(ours, reference.solarize(every, 128).float())


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_has_the_same_bits_in_any_batch(device):
    levels, draws = pixels(num=8).to(device), source(8, device=device)
    whole = change_colours(levels.flatten(0, 1).float(), EVERYTHING, draws).unflatten(0, (8, 2))
    order = torch.tensor([5, 0, 7, 1, 2, 6, 3, 4])
    for rows in (*order.split(3), *order.split(1)):
        part = dataclasses.replace(draws, epoch=draws.epoch[rows], index=draws.index[rows])
        some = change_colours(levels[rows].flatten(0, 1).float(), EVERYTHING, part)
        assert torch.equal(some.unflatten(0, (-1, 2)), whole[rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_views_on_a_gpu_are_those_on_the_cpu():
    augment = dataclasses.replace(EVERYTHING, erase_rate=0.5)
    images, flips = pixels(32), torch.arange(64).view(32, 2) % 2 == 0
    on_cpu = DeviceAugment()(images, flips, augment, source(32))
    on_gpu = DeviceAugment().cuda()(images.cuda(), flips.cuda(), augment, source(32, device="cuda"))
    gap = (on_gpu.cpu() - on_cpu).abs()
    # a level in a thousand may be solarised on one side of the threshold only
    assert gap.median() < 1e-5 and (gap > 1e-3).float().mean() < 1e-3


def test_three_augment_is_exactly_one_of_three():
    num = 3000
    colours = torch.tensor([200.0, 100.0, 40.0]).view(1, 3, 1, 1).expand(num, 3, 8, 8).clone()
    colours[:, :, 4, 4] += 20.0
    changed = change_colours(colours, Augment(three_augment=True, blur_kernel=3), source(num, 1))
    grey = (changed[:, 0] == changed[:, 2]).flatten(1).all(1)
    solarised = (changed[:, 0, 0, 0] == 55.0) & (changed[:, 2, 0, 0] == 40.0)
    blurred = ((changed[:, :, 0, 0] - colours[:, :, 0, 0]).abs() < 1e-3).all(1)
    counts = Counter(zip(grey.tolist(), solarised.tolist(), blurred.tolist(), strict=True))
    assert set(counts) == {(True, False, False), (False, True, False), (False, False, True)}
    assert all(abs(count / num - 1 / 3) < 0.03 for count in counts.values())


def test_in_memory_channels_may_come_last():
    images = pixels(2, 32, 1)
    channels_last = images.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    flips, step = torch.tensor([[True], [False]]), DeviceAugment()
    augment = dataclasses.replace(EVERYTHING, blur_rate=1.0, solarize_rate=0.5, jitter_rate=1.0)
    views = step(images, flips, augment, source(2, 1))
    assert torch.equal(step(channels_last, flips, augment, source(2, 1)), views)


def test_jitter_draws_have_torchvisions_ranges_and_rate():
    num = 2000
    flat = torch.full((num, 3, 1, 1), 100.0)
    brighter = change_colours(flat, Augment(jitter=(0.4, 0, 0, 0)), source(num, 1))[:, 0, 0, 0]
    untouched = brighter == 100.0
    assert abs(untouched.float().mean() - 0.2) < 0.03
    assert 60 <= brighter.min() < 61 and 139 < brighter.max() <= 140
    assert abs(brighter.mean() - 100) < 2


def model(**views):
    groups = {name: ViewGroup(name=name, size=32, **options) for name, options in views.items()}
    encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=1)
    return PretrainModel(encoder, seed=3, views=groups)


def batch(num=4, count=2, group="view"):
    return {
        f"{group}/image": pixels(num, 32, count),
        f"{group}/flip": torch.arange(num * count).view(num, count) % 2 == 0,
        "index": torch.arange(num),
        "epoch": torch.zeros(num, dtype=torch.int64),
    }


def test_a_model_colours_in_training_only():
    plain, coloured = model(view={"count": 2}), model(view={"count": 2, "augment": EVERYTHING})
    assert not torch.equal(plain.images(batch()), coloured.images(batch()))
    assert torch.equal(plain.eval().images(batch()), coloured.eval().images(batch()))


def test_under_autocast_views_stay_float32():
    coloured = model(view={"count": 2, "augment": EVERYTHING})
    with torch.autocast("cpu", torch.bfloat16):
        views = coloured.images(batch())
    assert torch.equal(views, coloured.images(batch()))


def test_compiled_views_are_one_graph(whole_graph):
    coloured = model(other={"count": 1}, view={"count": 2, "augment": EVERYTHING})
    compiled = whole_graph(coloured.images)
    torch.testing.assert_close(compiled(batch()), coloured.images(batch()))


def test_without_augmentation_views_are_only_flipped_and_normalised():
    inputs = batch()
    images, flips = inputs["view/image"], inputs["view/flip"]
    views = DeviceAugment(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))(images, flips)
    torch.testing.assert_close(views[0, 0], images[0, 0].flip(-1) / 127.5 - 1)
    torch.testing.assert_close(views[0, 1], images[0, 1] / 127.5 - 1)


def test_the_recipe_section_has_the_same_keys_and_defaults():
    section = Section()
    assert section.model_dump() == dataclasses.asdict(Augment())
    assert Augment(**section.model_dump()).is_off


def test_options_that_only_repeat_what_holds_are_accepted():
    ViewGroup(crop="center", flip_rate=0.0, scale=(0.2, 1.0))
    ViewGroup(augment=Augment(jitter=JITTER, jitter_rate=0.5, blur_rate=0.5, blur_kernel=7))
    ViewGroup(augment=Augment(three_augment=True, blur_sigma=(0.1, 0.5), solarize_threshold=9))


def recipe(augment):
    return recipe_from_dict(
        {
            "run_name": "test",
            "data": {
                "path": "photos",
                "batch_size": 4,
                "views": {"global": {"count": 2, "size": 32, "augment": augment}},
            },
            "encoder": {"name": "vit_tiny16"},
            "algorithms": {"mae": {}},
            "trainer": {"max_duration": "1ep"},
        }
    )


def test_a_recipe_says_how_views_change():
    changes = {"jitter": [0.4, 0.4, 0.2, 0.1], "blur_rate": [0, 0.9], "rand_augment": {}}
    group = build_views(recipe(changes))["global"]
    expected = Augment(jitter=JITTER, blur_rate=(0.0, 0.9), rand_augment=RandAugment())
    assert group.augment == expected
    assert build_views(recipe({}))["global"].augment.is_off
