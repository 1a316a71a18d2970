"""The geometry of the boxes' augmentation; ``test_boxes.py`` has what is read in them."""

import pytest
import torch

from pospre.algorithms.crop_field.field import (
    enclosing_box,
    mirrored_image,
    place_boxes,
    reversed_columns,
)
from tests.nn.positions.test_boxes import in_boxes, random_boxes, random_field


def test_reversed_columns_mirror_the_positions():
    boxes = random_boxes()
    flips = torch.arange(24).view(6, 4) % 3 == 0
    turned = reversed_columns(boxes, flips)
    plain = in_boxes(random_field(), boxes.flatten(0, 1), (3, 4)).unflatten(1, (3, 4))
    sampled = in_boxes(random_field(), turned.flatten(0, 1), (3, 4)).unflatten(1, (3, 4))
    expected = torch.where(flips.flatten().view(-1, 1, 1, 1), plain.flip(2), plain)
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-12)


def test_the_mirrored_image_has_mirrored_boxes():
    boxes = random_boxes()
    field = random_field()
    mirrored = in_boxes(field.flip(1), mirrored_image(boxes).flatten(0, 1), (3, 4))
    plain = in_boxes(field, boxes.flatten(0, 1), (3, 4)).unflatten(1, (3, 4)).flip(2)
    torch.testing.assert_close(mirrored, plain.flatten(1, 2), rtol=0, atol=1e-12)


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
