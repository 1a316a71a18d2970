"""Crop field: the invariants of the specification, beside each host it works with."""

import math
from typing import Any

import pytest
import torch

from pospre import attach
from pospre.algorithms.crop_field.crop_field import CropField, PositionField
from pospre.algorithms.crop_field.field import sample_field
from pospre.batch import box_key, field_box_key, flip_key
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.nn.build import build_encoder
from pospre.nn.positions import sincos_positions
from tests.algorithms.cases import Case, written

LEARNED = {"positions": "learned"}
SINCOS: dict[str, Any] = {"field": "sincos", "field_size": None}


def built(*names, encoder=LEARNED, **options):
    case = Case((*names, "crop_field"), {"crop_field": options}, encoder)
    model, algorithms = case.build()
    return model, algorithms, case.batch()


def filled(*names, encoder=LEARNED, **options):
    model, algorithms, batch = built(*names, encoder=encoder, **options)
    return model, written(model, algorithms, batch)


def source(model) -> PositionField:
    field = model.positions.named["crop_field"]
    assert isinstance(field, PositionField)
    return field


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


def test_boxes_are_a_function_of_the_sample_alone():
    model, algorithms, batch = built("mae")
    whole = written(model, algorithms, batch)["view/field_box"]
    rows = {key: value[2:3] for key, value in batch.items()}
    assert torch.equal(written(model, algorithms, rows)["view/field_box"], whole[2:3])
    later = batch | {"epoch": batch["epoch"] + 1}
    assert not torch.equal(written(model, algorithms, later)["view/field_box"], whole)
    once = dict(batch)
    for _ in range(2):
        algorithms[-1].write(once, model)
    assert torch.equal(once["view/field_box"], whole)


@pytest.mark.parametrize("host", ["mae", "droppos"])
def test_kept_patches_get_the_vectors_of_their_places(host):
    model, batch = filled(host)
    keep = batch["view/keep"]
    given = source(model)(torch.zeros(*keep.shape, 192), batch, EncoderPass(keep="view/keep"))
    field = source(model).field
    assert field is not None
    every = sample_field(field, batch["view/field_box"][:, 0], (8, 8))
    torch.testing.assert_close(given, every[torch.arange(4)[:, None], keep])


def test_mirrored_views_mirror_their_positions():
    model, batch = filled("mae", encoder={}, **SINCOS, box_scale="const")
    given = source(model)(torch.zeros(4, 64, 192), batch, EncoderPass()).unflatten(1, (8, 8))
    plain = batch | {"view/field_box": batch["view/box"]}
    expected = source(model)(torch.zeros(4, 64, 192), plain, EncoderPass()).unflatten(1, (8, 8))
    flip = batch["view/flip"][:, 0]
    assert flip.any() and not flip.all()
    torch.testing.assert_close(given[~flip], expected[~flip])
    torch.testing.assert_close(given[flip], expected[flip].flip(2), rtol=0, atol=1e-5)


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
        where = EncoderPass()
        return model.encoder(
            pixels, positions=lambda p: source(model)(p, {"view/field_box": boxes}, where)
        )

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
    assert model.registry.writers["global/flip"] == "crop_field"


def test_whole_images_get_the_whole_field():
    model, _ = filled("mae", encoder={}, **SINCOS)
    plain = build_encoder("vit_tiny16", image_size=32, patch_size=4, depth=2)
    plain.load_state_dict(model.encoder.state_dict())
    with torch.no_grad():
        assert plain.pos_embed is not None
        plain.pos_embed[0, 1:] = sincos_positions(192, 8, 8)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.tokens(images), plain(images), rtol=1e-4, atol=1e-4)


def test_whole_images_of_another_shape_too():
    model, _ = filled("mae")
    tokens = model.tokens(torch.randn(2, 3, 16, 48))
    assert tokens.shape == (2, 1 + 4 * 12, 192)


@pytest.mark.parametrize("host", ["mae", "droppos", "ijepa", "dinov2"])
def test_gradient_reaches_field_and_class_position_never_the_teacher(host):
    model, batch = filled(host)
    model.loss(model(batch), batch)["total"].backward()
    field, table = source(model).field, model.encoder.pos_embed
    assert field is not None and field.grad is not None and field.grad.any()
    assert table is not None and table.grad is not None and table.grad[:, :1].any()
    assert not table.grad[:, 1:].any() and not table[:, 1:].any()
    if model.teacher is not None:
        assert model.teacher_positions is not None
        frozen = [*model.teacher.parameters(), *model.teacher_positions.parameters()]
        assert all(p.grad is None and not p.requires_grad for p in frozen)


@pytest.mark.parametrize("host", ["mae", "ijepa"])
def test_decoders_follow_the_boxes(host):
    model, batch = filled(host, box_scale="const")
    before = model.loss(model(batch), batch)["total"]
    elsewhere = batch | {"view/field_box": batch["view/field_box"] * 0.5}
    with torch.no_grad():
        field = source(model).field
        assert field is not None
        field.zero_()  # the encoder learns nothing of the place
        here = model.loss(model(batch), batch)["total"]
        there = model.loss(model(elsewhere), elsewhere)["total"]
    assert before != here and here != there


def test_sincos_field_has_nothing_to_learn():
    model, _ = filled("mae", encoder={}, **SINCOS)
    assert not list(source(model).parameters())


def test_half_precision_does_not_touch_the_field():
    model, batch = filled("mae")
    where = EncoderPass(keep="view/keep")
    position = torch.zeros(4, 16, 192)
    exact = source(model)(position, batch, where)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(source(model)(position, batch, where), exact)


def test_without_other_tokens_the_table_does_not_learn():
    model, batch = filled("mae", encoder={"positions": "learned", "class_token": False})
    model.loss(model(batch), batch)["total"].backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field_size": 1}, r"'crop_field.field_size' is 1 .*greater than or equal to 2"),
        (
            {"scale_range": (0.0, 1.0)},
            r"'crop_field.scale_range' is \(0.0, 1.0\) .*0 < low",
        ),
        ({"scale_range": (0.2, math.inf)}, r"'crop_field.scale_range.1' is inf .*finite"),
        ({"box_scale": "beat"}, r"'crop_field.box_scale' is 'beat' .*'beta'"),
        ({"enclose": "globals"}, r"no group 'global' \(only view\)"),
        (
            {"field": "sincos", "field_size": 9},
            r"field_size = 9 is of no use with .*field = sincos",
        ),
        ({"field": "sincos", "interpolation": "bilinear"}, r"crop_field.interpolation = bilinear"),
        (
            {"box_scale": "const", "scale_range": (0.2, 1.0)},
            r"scale_range = \(0.2, 1.0\) is of no use with crop_field.box_scale = const",
        ),
        ({"box_scale": "fill", "scale_range": (0.2, 1.0)}, r"crop_field.box_scale = fill"),
    ],
)
def test_bad_options_are_refused_at_attachment(options, message):
    model, _ = Case(("mae",)).build()
    with pytest.raises(UserError, match=message):
        attach(model, "crop_field", **options)
    assert model.position_source is None


@pytest.mark.parametrize("kind", ["none", "relative", "shared_relative"])
def test_encoders_without_additive_positions_are_refused(kind):
    model, _ = Case(("simmim",), encoder={"positions": kind}).build()
    with pytest.raises(UserError, match=f"encoder.positions is {kind}. Use learned"):
        attach(model, "crop_field")


def test_it_needs_company_that_was_attached_before():
    model = PretrainModel(build_encoder("vit_tiny16", image_size=32, depth=1), seed=0)
    with pytest.raises(UserError, match="none stands before it"):
        attach(model, "crop_field")


def test_beside_mp3_it_is_refused():
    model, _ = Case(("mp3",)).build()
    with pytest.raises(UserError, match=r"mp3 and crop_field both decide which positions"):
        attach(model, "crop_field")


def test_attaching_twice_is_attaching_once():
    model, _ = filled("mae")
    names = [name for name, _ in model.named_parameters()]
    CropField(field="sincos").attach(model)
    assert [name for name, _ in model.named_parameters()] == names
