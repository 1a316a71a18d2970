"""The position field against torch's own sampling, and the geometry of its augmentation."""

import pytest
import torch
import torch.nn.functional as F

from pospre import draws
from pospre.algorithms.crop_field.field import (
    beta_2_5,
    enclosing_box,
    mirrored_image,
    place_boxes,
    reversed_columns,
    sample_field,
    sincos_in_boxes,
)
from pospre.nn.positions.sincos import sincos_positions

WHOLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)


def random_field(height=9, width=7, dim=5):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(height, width, dim, dtype=torch.float64, generator=generator)


def random_boxes(count=6, views=4):
    draw = torch.rand(
        count, views, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    low, size = draw[..., :2] * 0.6, 0.05 + draw[..., 2:] * 0.3
    return torch.cat([low, low + size], dim=-1)


@pytest.mark.parametrize("kind", ["bicubic", "bilinear"])
def test_sampling_is_grid_sample_with_repeated_border(kind):
    field = random_field()
    outside = torch.tensor([[-0.4, 0.7, 0.3, 1.6]], dtype=torch.float64)
    boxes = torch.cat([random_boxes().flatten(0, 1), outside])
    rows, cols = 3, 4
    for box, ours in zip(boxes, sample_field(field, boxes, (rows, cols), kind), strict=True):
        u = box[0] + (box[2] - box[0]) * (torch.arange(cols).double() + 0.5) / cols
        v = box[1] + (box[3] - box[1]) * (torch.arange(rows).double() + 0.5) / rows
        places = torch.stack([u.expand(rows, -1), v[:, None].expand(-1, cols)], dim=-1) * 2 - 1
        theirs = F.grid_sample(
            field.permute(2, 0, 1).unsqueeze(0),
            places.unsqueeze(0),
            mode=kind,
            padding_mode="border",
            align_corners=False,
        )
        torch.testing.assert_close(ours, theirs[0].flatten(1).T, rtol=0, atol=1e-12)


def test_the_whole_field_on_its_own_grid_is_the_field():
    field = random_field()
    sampled = sample_field(field, WHOLE, (9, 7))
    torch.testing.assert_close(sampled[0], field.flatten(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", [4, 14, 20])
def test_the_whole_field_on_another_grid_is_torchs_resize(side):
    field = random_field(10, 10)
    resized = F.interpolate(
        field.permute(2, 0, 1).unsqueeze(0), size=(side, side), mode="bicubic", align_corners=False
    )
    sampled = sample_field(field, WHOLE, (side, side))
    torch.testing.assert_close(sampled[0], resized[0].flatten(1).T, rtol=0, atol=1e-12)


def test_one_place_has_one_vector_in_overlapping_crops():
    """Two 6×6 crops of 1/12 patches, three columns and two rows apart."""
    left, top, cell = 0.1, 0.2, 1 / 12
    boxes = torch.tensor(
        [
            [left, top, left + 6 * cell, top + 6 * cell],
            [left + 3 * cell, top + 2 * cell, left + 9 * cell, top + 8 * cell],
        ],
        dtype=torch.float64,
    )
    for sampled in (
        sample_field(random_field(50, 50), boxes, (6, 6)),
        sincos_in_boxes(16, boxes, (6, 6), (14, 14)),
    ):
        one, other = sampled.unflatten(1, (6, 6))
        tolerance = 1e-12 if sampled.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(one[2:, 3:], other[:4, :3], rtol=0, atol=tolerance)


def test_sincos_over_the_whole_field_is_the_grid_of_mae():
    boxes = WHOLE.float()
    table = sincos_in_boxes(16, boxes, (5, 7), (5, 7))[0]
    torch.testing.assert_close(table, sincos_positions(16, 5, 7), rtol=0, atol=2e-6)


def test_sampling_gives_the_field_an_exact_gradient():
    field = random_field(5, 4, 2).requires_grad_()
    boxes = random_boxes(2, 1).flatten(0, 1)
    assert torch.autograd.gradcheck(lambda p: sample_field(p, boxes, (2, 3)), (field,))


def test_reversed_columns_mirror_the_positions():
    boxes = random_boxes()
    flips = torch.arange(24).view(6, 4) % 3 == 0
    turned = reversed_columns(boxes, flips)
    plain = sample_field(random_field(), boxes.flatten(0, 1), (3, 4)).unflatten(1, (3, 4))
    sampled = sample_field(random_field(), turned.flatten(0, 1), (3, 4)).unflatten(1, (3, 4))
    expected = torch.where(flips.flatten().view(-1, 1, 1, 1), plain.flip(2), plain)
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-12)


def test_the_mirrored_image_has_mirrored_boxes():
    boxes = random_boxes()
    field = random_field()
    mirrored = sample_field(field.flip(1), mirrored_image(boxes).flatten(0, 1), (3, 4))
    plain = sample_field(field, boxes.flatten(0, 1), (3, 4)).unflatten(1, (3, 4)).flip(2)
    torch.testing.assert_close(mirrored, plain.flatten(1, 2), rtol=0, atol=1e-12)


def test_beta_draws_have_its_moments():
    keys = draws.sample_keys(0, 0, torch.arange(40_000), 0, "test")
    drawn = beta_2_5(draws.uniform(keys, 6)).double()
    assert drawn.mean() == pytest.approx(2 / 7, abs=0.003)
    assert drawn.var() == pytest.approx(10 / (49 * 8), abs=0.001)
    assert (drawn**3).mean() == pytest.approx(2 * 3 * 4 / (7 * 8 * 9), abs=0.001)


@pytest.mark.parametrize("area", [0.05, 0.3, 1.0])
def test_placed_boxes_keep_their_geometry_and_lie_in_the_field(area):
    boxes = random_boxes()
    around = enclosing_box(boxes)
    assert torch.equal(around[:, :2], boxes[..., :2].amin(1))
    assert torch.equal(around[:, 2:], boxes[..., 2:].amax(1))
    shift = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    placed = place_boxes(boxes, around, torch.full((6,), area, dtype=torch.float64), shift)
    assert placed.min() >= -1e-12 and placed.max() <= 1 + 1e-12
    old, new = boxes[..., 2:] - boxes[..., :2], placed[..., 2:] - placed[..., :2]
    factor = (new / old)[:, :1, :1]
    torch.testing.assert_close(new, old * factor)
    first = boxes[:, :1, :2]
    torch.testing.assert_close(
        placed[..., :2] - placed[:, :1, :2], (boxes[..., :2] - first) * factor
    )
    size = (around[:, 2:] - around[:, :2]) * factor[:, 0]
    free = size.amax(-1) < 1 - 1e-9
    torch.testing.assert_close(size.prod(-1)[free], torch.full_like(size[:, 0], area)[free])
    torch.testing.assert_close(enclosing_box(placed)[:, :2], shift * (1 - size))
    if area == 1.0:
        assert not free.any()  # only a square of the image's shape can fill it: the rest is cut
