"""Export of a position field: a plain ViT with the table has the features of whole images."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from pospre.evaluation.models import open_model, subject_of
from pospre.export import main
from pospre.exporting.export import export
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import recipe_from_dict
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.build import build_model, load_model
from pospre.training.foreign import Shown
from pospre.training.start_weights import load_weights
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe

FIELD = {"field_size": 7}
FIELDS: list[tuple[dict[str, Any], str]] = [
    (FIELD, "learned"),
    ({**FIELD, "interpolation": "bilinear"}, "learned"),
    ({}, "sincos"),
]


def checkpoint(
    folder: Path, *, options: dict[str, Any] | None = None, positions: str = "learned"
) -> Path:
    """Save a run of MAE, with the crop field of these options if any."""
    field = {} if options is None else {"crop_field": options}
    return save_checkpoint(tiny_recipe(folder, "mae", field, positions=positions))


def exported(path: Path, out: Path, **options: Any) -> dict[str, Tensor]:
    export(str(path), out, format="timm", num_classes=0, **options)
    return torch.load(out, weights_only=True)


@torch.no_grad()
def tokens_of(model: PretrainModel, *size: int) -> Tensor:
    """Return the tokens of images of this size, the same every time."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    return model.eval().encoder(images)


@pytest.mark.parametrize(("options", "positions"), FIELDS)
@pytest.mark.parametrize("grid", [None, "7x7", "3x5"])
def test_a_plain_vit_reproduces_whole_images(
    tmp_path: Path, options: dict[str, Any], positions: str, grid: str | None
) -> None:
    path = checkpoint(tmp_path / "runs", options=options, positions=positions)
    out = tmp_path / "encoder.pth"
    exported(path, out, grid=grid)
    rows, cols = (4, 4) if grid is None else map(int, grid.split("x"))
    size = (16 * rows, 16 * cols)
    plain: Any = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, depth=2, num_classes=0, checkpoint_path=str(out)
    ).eval()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = plain.forward_features(images)
    ours = tokens_of(load_model(str(path))[0], *size)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [None, "7x7"])
def test_the_command_reads_the_teachers_field(tmp_path: Path, grid: str | None) -> None:
    plain = tiny_recipe(tmp_path / "runs", "mae", positions="learned").dump()
    plain["algorithms"] |= {"crop_field": FIELD, "ema_teacher": {}}
    path = save_checkpoint(recipe_from_dict(plain))
    written, chosen = {}, [] if grid is None else ["--grid", grid]
    for weights in ("student", "teacher"):
        out = tmp_path / f"{weights}.pth"
        assert main([str(path), str(out), "--format", "timm", "--weights", weights, *chosen]) == 0
        written[weights] = torch.load(out, weights_only=True)
    ours, others = (written[weights]["pos_embed"] for weights in ("teacher", "student"))
    assert not torch.equal(ours, others)
    saved = read_checkpoint(str(path)).content["state"]["model"]
    for key, tensor in written["teacher"].items():
        if key != "pos_embed" and not key.startswith("head."):
            assert torch.equal(tensor, saved[f"teacher.module.{key}"]), key
    if grid is not None:  # that of the field
        assert torch.equal(ours, saved["teacher.module.positions.pos_embed"])


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_without_a_field_the_table_has_the_grid_asked_for(tmp_path: Path, positions: str) -> None:
    path = checkpoint(tmp_path / "runs", positions=positions)
    table = exported(path, tmp_path / "encoder.pth", grid="6x6")["pos_embed"]
    assert table.shape == (1, 1 + 6 * 6, 192) and bool(table.any()) == (positions == "learned")


@pytest.mark.parametrize(("options", "positions"), FIELDS)
def test_a_model_with_a_field_is_measured_as_it_is_and_by_its_files(
    tmp_path: Path, options: dict[str, Any], positions: str
) -> None:
    model = load_model(str(checkpoint(tmp_path / "runs", options=options, positions=positions)))[0]
    expected = tokens_of(model, 64, 64)
    subject = subject_of(model)
    assert torch.equal(tokens_of(subject.model, 64, 64), expected)
    assert subject.recipe.encoder.positions == positions
    whole, alone = tmp_path / "model.pth", tmp_path / "encoder.pth"
    torch.save(model.state_dict(), whole)  # the field in its own size
    torch.save(model.timm_state(), alone)  # read at the images' grid
    found = [open_model(str(whole), shown=Shown((64, 64))), open_model(str(alone))]
    assert [each.model.encoder.grid for each in found] == [(4, 4), (4, 4)]
    torch.testing.assert_close(tokens_of(found[1].model, 64, 64), expected, rtol=0, atol=1e-5)
    if options.get("interpolation") != "bilinear":  # a bare file says nothing of that
        torch.testing.assert_close(tokens_of(found[0].model, 64, 64), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("options", "positions"), [FIELDS[0], FIELDS[2]])
@pytest.mark.parametrize("size", [64, 96])
def test_another_training_starts_from_the_field(
    tmp_path: Path, options: dict[str, Any], positions: str, size: int
) -> None:
    path = checkpoint(tmp_path / "runs", options=options, positions=positions)
    start = tiny_recipe(tmp_path / "next", "mae", positions="learned", image_size=size)
    model = build_model(start)
    assert "; fresh" not in load_weights(model, str(path))
    expected = tokens_of(load_model(str(path))[0], size, size)
    torch.testing.assert_close(tokens_of(model, size, size), expected, rtol=1e-5, atol=1e-5)
