"""PART: its golden numbers, what it draws, and what it learns from pictures that tell the place."""

import pytest
import torch
from torch import Tensor

from pospre.algorithms.part import (
    PART,
    PatchRelations,
    draw_boxes,
    draw_pairs,
    mosaic,
    read_patches,
    relations,
)
from pospre.batch import Batch
from pospre.model.model import PretrainModel
from pospre.model.position_task import Relations
from pospre.nn.encoder_interface import patchify
from tests.algorithms.cases import GROUPS, Case, made, tiny_model, written
from tests.algorithms.control_pictures import train

SIDE, PATCH = (24, 40), (4, 8)


def keys(count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,))


def test_golden_relations_and_pixels() -> None:
    boxes = torch.tensor([[[0.0, 0, 4, 4], [6.0, 2, 8, 8]]])
    assert relations(boxes, torch.tensor([[[0, 1]]])).tolist() == [[[1.25, 0.75, 0.5, 1.5]]]
    image = torch.arange(64.0).view(1, 1, 8, 8)
    read = read_patches(image, torch.tensor([[[2.5, 3.0, 6.5, 7.0]]]), (4, 4))
    assert read[0, 0, 0, 0].tolist() == [26.5, 27.5, 28.5, 29.5]


def test_whole_boxes_of_the_grid_are_its_patches() -> None:
    """In row-major order, of any shape of grid and patch; further cells stay free."""
    image = torch.rand(2, 3, *SIDE)
    rows, columns = (
        torch.arange(side // patch) * patch for side, patch in zip(SIDE, PATCH, strict=True)
    )
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    low = torch.stack([x, y], -1).flatten(0, 1).float().expand(2, -1, -1)
    boxes = torch.cat([low, low + torch.tensor([8.0, 4.0])], -1)
    read = read_patches(image, boxes, PATCH)
    torch.testing.assert_close(mosaic(read, (6, 5)), image)
    some = patchify(mosaic(read[:, :7], (6, 5)), PATCH)
    torch.testing.assert_close(some[:, :7], patchify(image, PATCH)[:, :7])
    assert not some[:, 7:].any()


def test_boxes_lie_anywhere_inside_and_pairs_differ() -> None:
    boxes = draw_boxes(keys(4000), 5, side=SIDE, patch=PATCH, sizes=(0.5, 2.0))
    low, high = boxes[..., :2], boxes[..., 2:]
    whole, unit = torch.tensor([40.0, 24.0]), torch.tensor([8.0, 4.0])
    assert (low >= 0).all() and (high <= whole + 1e-5).all()
    sizes = (high - low) / unit
    assert sizes.min() > 0.4999 and sizes.max() < 2.0001
    assert (sizes.mean((0, 1)) - 1.25).abs().max() < 0.02
    equal = draw_boxes(keys(20_000), 2, side=(32, 32), patch=(4, 4), sizes=(1.0, 1.0))
    offsets = relations(equal, torch.tensor([[[0, 1]]]).expand(20_000, 1, 2))[..., :2]
    assert offsets.var((0, 1)).tolist() == pytest.approx([49 / 6] * 2, rel=0.03)  # range² / 6
    pairs = draw_pairs(keys(3000), 5, 20)  # all that exist
    codes = pairs[..., 0] * 5 + pairs[..., 1]
    assert (codes.sort(1).values == codes[0].sort().values).all()
    assert (pairs[..., 0] != pairs[..., 1]).all()
    first = torch.bincount(codes[:, 0], minlength=25)
    assert first[first > 0].min() > 100 and int((first > 0).sum()) == 20


def test_moving_patches_with_their_boxes_moves_the_answers() -> None:
    """Exactly: their slots in the mosaic tell nothing, in training and after it."""
    model = Case(("part",), {"part": {"sizes": (1.0, 1.0)}}, {"positions": "learned"}).build()
    model.double()
    batch = written(model, Case(("part",)).batch())
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    boxes, pairs = batch["part/patch_box"].double(), batch["part/pair"]
    moved = {"part/patch_box": boxes[:, order], "part/pair": order.argsort()[pairs]}
    for training in (True, False):
        model.train(training)
        found, again, other = (
            model({**batch, "part/patch_box": boxes, **changes})["part"]["predicted"]
            for changes in ({}, moved, {"part/patch_box": boxes[:, order]})
        )
        torch.testing.assert_close(found, again, atol=1e-12, rtol=0)
        assert (found - other).abs().max() > 1e-4  # also after training the cut patches are read


def learned(**options: object) -> list[float]:
    """Train a small model; return R² of each number on pictures that it has not seen.

    Of pictures that tell nothing: tests/model/test_trained_leaks.py.
    """
    model = tiny_model(made("part", **options), views={"part": GROUPS["part"]}, positions="none")
    batch = next(train(model, 60, told=True, lr=2e-3))
    with torch.no_grad():
        return answered(model.eval(), batch).score().tolist()


def answered(model: PretrainModel, batch: Batch) -> Relations:
    head = model.objectives["part"]
    assert isinstance(head, PatchRelations)
    return head.answers(model(batch)["part"], batch)


def test_pictures_that_tell_the_place_are_understood() -> None:
    assert min(learned(log_ratios=True)) > 0.8
    assert max(learned(predictor="attention", log_ratios=True)) > 0.5  # one axis first


def test_published_and_own_losses() -> None:
    model = Case(("part",), {"part": {"log_ratios": True}}).build()
    batch = written(model, Case(("part",)).batch())
    predicted, true = answered(model, batch)
    plain = relations(batch["part/patch_box"], batch["part/pair"])
    torch.testing.assert_close(true[..., 2:].exp(), plain[..., 2:])
    loss = model.loss(model(batch), batch)["part"]
    assert torch.equal(loss, torch.nn.functional.smooth_l1_loss(predicted, true))
    half = Case(("part",), {"part": {"share": 0.5, "sizes": (1.5, 1.5)}}).build()
    batch = written(half, Case(("part",)).batch())
    predicted, true = answered(half, batch)
    assert batch["part/patch_box"].shape == (4, 32, 4)
    assert true.shape == (4, 64, 2)  # sizes are equal: they are not asked
    loss = half.loss(half(batch), batch)["part"]
    assert torch.equal(loss, (predicted - true).square().mean())


def test_a_scheme_that_it_never_uses_is_said() -> None:
    with pytest.warns(UserWarning, match="part hides all places, so that .* = sincos is never"):
        tiny_model(PART(), views={"part": GROUPS["part"]}, positions="sincos")
