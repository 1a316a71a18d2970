"""Export of a position field: a plain ViT with the table has the features of whole images."""

from typing import Any

import pytest
import timm
import torch

from pospre.algorithms.crop_field.crop_field import PositionField
from pospre.errors import UserError
from pospre.export import main
from pospre.exporting.export import export
from pospre.recipe.recipe import recipe_from_dict
from pospre.training.build import build_model
from pospre.training.checkpoints.content import load_model
from pospre.training.start_weights import load_weights
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe


def checkpoint(folder, *, options=None, **encoder):
    plain = tiny_recipe(folder, "mae", **encoder).dump()
    if options is not None:
        plain["algorithms"]["crop_field"] = options
    return save_checkpoint(recipe_from_dict(plain))


def exported(path, out, **options):
    export(str(path), out, format="timm", num_classes=0, **options)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    "options",
    [{"field_size": 7}, {"field_size": 7, "interpolation": "bilinear"}, {"field": "sincos"}],
)
@pytest.mark.parametrize("grid", [None, "7x7", "3x5"])
def test_a_plain_vit_reproduces_whole_images(tmp_path, options, grid):
    path = checkpoint(tmp_path / "runs", options=options, positions="learned")
    out = tmp_path / "encoder.pth"
    exported(path, out, grid=grid)
    rows, cols = (4, 4) if grid is None else map(int, grid.split("x"))
    size = (16 * rows, 16 * cols)
    plain: Any = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, depth=2, num_classes=0, checkpoint_path=str(out)
    ).eval()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = load_model(str(path))[0].tokens(images), plain.forward_features(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_native_grid_is_the_field_itself(tmp_path):
    path = checkpoint(tmp_path / "runs", options={"field_size": 7}, positions="learned")
    model = load_model(str(path))[0]
    written = exported(path, tmp_path / "encoder.pth", grid="7x7")["pos_embed"]
    assert written.shape == (1, 50, 192)
    source = model.positions.named["crop_field"]
    assert isinstance(source, PositionField)
    assert source.field is not None and model.encoder.pos_embed is not None
    field = source.field
    torch.testing.assert_close(written[0, 1:], field.flatten(0, 1).detach(), rtol=0, atol=1e-6)
    assert torch.equal(written[:, :1], model.encoder.pos_embed[:, :1])


@pytest.mark.parametrize("grid", [None, "7x7"])
def test_the_command_reads_the_teachers_field(tmp_path, grid):
    plain = tiny_recipe(tmp_path / "runs", "mae", positions="learned").dump()
    plain["algorithms"] |= {"crop_field": {"field_size": 7}, "ema_teacher": {}}
    path = save_checkpoint(recipe_from_dict(plain))
    written, chosen = {}, [] if grid is None else ["--grid", grid]
    for weights in ("student", "teacher"):
        out = tmp_path / f"{weights}.pth"
        assert main([str(path), str(out), "--format", "timm", "--weights", weights, *chosen]) == 0
        written[weights] = torch.load(out, weights_only=True)
    ours, others = (written[weights]["pos_embed"][0, 1:] for weights in ("teacher", "student"))
    assert not torch.equal(ours, others)
    saved = torch.load(path, weights_only=False)["state"]["model"]
    for key, tensor in written["teacher"].items():
        if key != "pos_embed" and not key.startswith("head."):
            assert torch.equal(tensor, saved[f"teacher.module.{key}"]), key
    if grid is not None:  # that of the field
        field = saved["teacher_positions.module.named.crop_field.field"]
        torch.testing.assert_close(ours, field.flatten(0, 1))


def test_a_table_is_resampled_too(tmp_path):
    path = checkpoint(tmp_path / "runs", positions="learned")
    written = exported(path, tmp_path / "encoder.pth", grid="6x6")["pos_embed"]
    assert written.shape == (1, 37, 192)


@pytest.mark.parametrize("grid", ["6", "0x4", "axb", "4x4x4"])
def test_a_grid_that_is_none_is_refused(tmp_path, grid):
    with pytest.raises(UserError, match=r"give rows and columns of patches, such as 14x14"):
        export("nowhere", tmp_path / "encoder.pth", format="timm", grid=grid)


def test_without_positions_there_is_no_grid(tmp_path):
    path = checkpoint(tmp_path / "runs", positions="none")
    with pytest.raises(UserError, match=r"encoder\.positions is none"):
        exported(path, tmp_path / "encoder.pth", grid="6x6")


@pytest.mark.parametrize("field", ["learned", "sincos"])
@pytest.mark.parametrize("size", [64, 96])
def test_another_training_starts_from_the_field(tmp_path, field, size):
    options = {"field": field, "field_size": 7 if field == "learned" else None}
    path = checkpoint(tmp_path / "runs", options=options, positions="learned")
    start = tiny_recipe(tmp_path / "next", "mae", positions="learned", image_size=size)
    model = build_model(start).eval()
    assert "; fresh" not in load_weights(model, str(path))
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = load_model(str(path))[0].tokens(images)
        torch.testing.assert_close(model.tokens(images), expected, rtol=1e-5, atol=1e-5)


def test_a_fixed_table_does_not_take_a_learned_field(tmp_path):
    path = checkpoint(tmp_path / "runs", options={"field_size": 7})
    model = build_model(tiny_recipe(tmp_path / "next", "mae"))
    with pytest.raises(UserError, match=r"has learned its own"):
        load_weights(model, str(path))


def test_a_new_field_is_said_to_be_fresh(tmp_path):
    path = checkpoint(tmp_path / "runs", positions="learned")
    plain = tiny_recipe(tmp_path / "next", "mae", positions="learned").dump()
    plain["algorithms"]["crop_field"] = {"field_size": 7}
    model = build_model(recipe_from_dict(plain))
    assert "; fresh: the positions of crop_field" in load_weights(model, str(path))
