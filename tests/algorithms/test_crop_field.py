"""Crop field beside each host it works with, and the geometry of boxes that it moves.

``test_boxes.py`` has what is read in them.
"""

from typing import Any

import pytest
import torch

from pospre.algorithms.crop_field import CropField, enclosing_box, mirrored_image, place_boxes
from pospre.batch import box_key, field_box_key, flip_key
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.places import Places, mirrored_boxes
from pospre.nn.positions.table import Table
from tests.algorithms.cases import NARROW, Case, made, written
from tests.nn.positions.test_boxes import in_boxes, random_boxes, random_field
from tests.refusals import refuses

LEARNED = {"positions": "learned"}
SINCOS: dict[str, Any] = {"encoder": {"positions": "sincos"}, "field_size": None}
WHOLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]])


def built(*names, encoder=LEARNED, **options):
    case = Case((*names, "crop_field"), {"crop_field": options}, encoder)
    return case.build(), case.batch()


def filled(*names, encoder=LEARNED, **options):
    model, batch = built(*names, encoder=encoder, **options)
    return model, written(model, batch)


def field(model) -> Table:
    """Return the encoder's positions: the field."""
    assert isinstance(model.encoder.positions, Table)
    return model.encoder.positions


def given(model, batch) -> torch.Tensor:
    """Return the positions that the encoder adds in the pass ``student``."""
    declared = model.layout.passes["student"]
    keep = None if declared.visible is None else batch[declared.visible]
    vectors = model.encoder.positions.embed(model.pass_places(declared, batch, keep))
    assert vectors is not None
    return vectors


def test_const_scale_leaves_the_boxes_as_they_are():
    _, batch = filled("mae", box_scale="const", flip_field="box_only")
    assert torch.equal(batch["view/field_box"], batch["view/box"])


@pytest.mark.parametrize("box_scale", ["beta", "uniform", "fill"])
def test_all_views_of_an_image_move_together_inside_the_field(box_scale):
    _, batch = filled("dinov2", box_scale=box_scale, flip_field="box_only")
    groups = ("global", "local")
    old, new = (
        torch.cat([batch[key(group)] for group in groups], dim=1)
        for key in (box_key, field_box_key)
    )
    assert new.min() >= 0 and new.max() <= 1 and new.dtype == torch.float32
    factor = ((new[..., 2] - new[..., 0]) / (old[..., 2] - old[..., 0]))[:, :1, None]
    torch.testing.assert_close(new - new[:, :1], (old - old[:, :1]) * factor, rtol=0, atol=1e-5)
    shift = new - old * factor
    torch.testing.assert_close(shift, shift[:, :1, [0, 1, 0, 1]].expand_as(shift))
    assert (factor - factor[0]).abs().max() > 1e-3


def test_globals_may_enclose_alone():
    _, batch = filled("dinov2", enclose="globals", box_scale="fill", flip_field="mirror_shared")
    around = batch["global/field_box"]
    size = around[..., 2:].amax(1) - around[..., :2].amin(1)
    torch.testing.assert_close(size.amax(1), torch.ones(4))


def test_boxes_that_are_written_twice_are_the_same():
    model, batch = built("mae")
    whole = written(model, batch)["view/field_box"]
    for _ in range(2):
        model.draw(batch)
    assert torch.equal(batch["view/field_box"], whole)


@pytest.mark.parametrize("host", ["mae", "droppos"])
def test_kept_patches_get_the_vectors_of_their_places(host):
    model, batch = filled(host)
    every = field(model).in_boxes(batch["view/field_box"][:, 0], (8, 8))
    expected = every[torch.arange(4)[:, None], batch["view/visible"]]
    torch.testing.assert_close(given(model, batch), expected)


def test_mirrored_views_mirror_their_positions():
    model, batch = filled("supervised", **SINCOS, box_scale="const")
    mirrored = given(model, batch).unflatten(1, (8, 8))
    plain = given(model, batch | {"view/field_box": batch["view/box"]}).unflatten(1, (8, 8))
    flip = batch["view/flip"][:, 0]
    assert flip.any() and not flip.all()
    torch.testing.assert_close(mirrored[~flip], plain[~flip])
    torch.testing.assert_close(mirrored[flip], plain[flip].flip(2), rtol=0, atol=1e-5)


def test_flipping_view_and_field_is_mirroring_each_patch_in_place():
    """The trap of ``with_view``: the layout of the tokens is all that differs."""
    model, batch = filled("mae", box_scale="const", flip_field="box_only")
    model = model.double().eval()
    batch["view/flip"][:] = False
    images = model.images(batch)[:, 0].double()
    flipped = images.flip(-1)
    in_place = images.unflatten(-1, (8, 4)).flip(-1).flatten(-2)
    turned = batch["view/field_box"][..., [2, 1, 0, 3]]

    def tokens(pixels, boxes):
        return model.encoder(pixels, places=Places((8, 8)).within(boxes.flatten(0, 1)))

    one = tokens(flipped, turned)[:, 1:].unflatten(1, (8, 8)).flip(2).flatten(1, 2)
    other = tokens(in_place, batch["view/field_box"])[:, 1:]
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_shared_mirroring_turns_all_views_and_boxes_of_an_image():
    before = Case(("dinov2",)).batch()
    model, after = filled("dinov2", flip_field="mirror_shared", box_scale="const")
    first = before["global/flip"][:, :1]
    assert first.any() and not first.all()
    for group in ("global", "local"):
        assert (after[flip_key(group)] == first).all()
        x0, y0, x1, y1 = before[box_key(group)].unbind(-1)
        mirrored = torch.stack([1 - x1, y0, 1 - x0, y1], dim=-1)
        expected = torch.where(first.unsqueeze(-1), mirrored, before[box_key(group)])
        torch.testing.assert_close(after[field_box_key(group)], expected)
    assert model.layout.writers["global/flip"] == "crop_field"


@pytest.mark.parametrize("options", [{}, SINCOS], ids=["learned", "sincos"])
@pytest.mark.parametrize("grid", [(8, 8), (4, 12)])
def test_whole_images_get_the_whole_field(options, grid):
    model, _ = filled("mae", **options)
    images = torch.randn(2, 3, 4 * grid[0], 4 * grid[1])
    tokens = model.encoder(images)
    assert tokens.shape == (2, 1 + grid[0] * grid[1], NARROW.embed_dim)
    assert torch.equal(model.encoder(images), tokens)  # the encoder alone is whole
    if options and grid != (8, 8):
        return  # at another grid the fixed table is resampled, in a box its waves are evaluated
    placed = model.encoder(images, places=Places(grid).within(WHOLE))
    torch.testing.assert_close(tokens, placed, rtol=1e-4, atol=1e-4)


def test_the_sincos_field_is_the_encoders_own_table():
    model, _ = filled("mae", **SINCOS)
    plain = Case(("mae",)).build().encoder
    plain.load_state_dict(model.encoder.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.encoder(images), plain(images))


@pytest.mark.parametrize("host", ["droppos", "dinov2"])
def test_gradient_reaches_field_and_class_position_never_the_teacher(host):
    model, batch = filled(host)
    model.loss(model(batch), batch)["total"].backward()
    table = field(model).pos_embed
    assert table.shape == (1, 1 + 9 * 9, NARROW.embed_dim) and table.grad is not None
    assert table.grad[:, :1].any() and table.grad[:, 1:].any()
    if model.teacher is not None:
        assert all(p.grad is None and not p.requires_grad for p in model.teacher.parameters())


@pytest.mark.parametrize("positions", ["learned", "learned_sincos"])
def test_a_field_is_drawn_as_white_noise_or_read_from_the_table_that_was_there(positions):
    options = {"image_size": 32, "patch_size": 4, "depth": 1, "positions": positions}
    encoder = build_encoder("vit_tiny16", **options)
    table: Any = encoder.positions
    before = table.in_boxes(WHOLE, (20, 20))[0].detach().clone()
    class_row = table.pos_embed[0, 0].detach().clone()
    model = PretrainModel(encoder, [CropField(field_size=20), made("mae")], seed=0)
    after = field(model).pos_embed[0].detach()
    assert torch.equal(after[0], class_row) and field(model).grid == (20, 20)
    if positions == "learned_sincos":  # a smooth start
        torch.testing.assert_close(after[1:], before, rtol=0, atol=1e-5)
        return
    assert after[1:].std() == pytest.approx(0.02, rel=0.02)
    rows = after[1:].unflatten(0, (20, 20))
    assert torch.cosine_similarity(rows[:, 1:], rows[:, :-1], dim=-1).mean().abs() < 0.02


@pytest.mark.parametrize("host", ["mae", "ijepa"])
def test_decoders_follow_the_boxes(host):
    model, batch = filled(host, box_scale="const")
    before = model.loss(model(batch), batch)["total"]
    elsewhere = batch | {"view/field_box": batch["view/field_box"] * 0.5}
    with torch.no_grad():
        field(model).pos_embed.zero_()  # the encoder learns nothing of the place
        here = model.loss(model(batch), batch)["total"]
        there = model.loss(model(elsewhere), elsewhere)["total"]
    assert before != here and here != there


def test_sincos_field_has_nothing_to_learn():
    model, _ = filled("mae", **SINCOS)
    alone = Case(("mae",)).build()
    trained = {name: p.shape for name, p in alone.named_parameters() if p.requires_grad}
    assert {n: p.shape for n, p in model.named_parameters() if p.requires_grad} == trained


def test_without_class_token_everything_learns():
    model, batch = filled("mae", encoder={"positions": "learned", "class_token": False})
    model.loss(model(batch), batch)["total"].backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@pytest.mark.parametrize(
    "box", [[0.0, 0.0, 32.0, 32.0], [0.5, 0.5, 0.25, 0.25], [0.0, float("nan"), 1.0, 1.0]]
)
def test_boxes_that_are_no_shares_of_the_image_are_refused(box):
    model, batch = built("mae")
    batch["view/box"][0, 0] = torch.tensor(box)
    refuses(r"the batch's 'view/box' has boxes from .* as shares", lambda: written(model, batch))


def test_mirrored_boxes_mirror_the_positions():
    boxes = random_boxes()
    flips = torch.arange(24).view(6, 4) % 3 == 0
    turned = mirrored_boxes(boxes, flips)
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
