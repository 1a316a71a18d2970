"""Positions when training starts from weights: they fit, or a message says what is lost."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import resize_rel_pos_bias_table

import pospre
from pospre.algorithms.crop_field import CropField
from pospre.errors import UserError
from pospre.exporting.export import export
from pospre.nn.positions.sincos import sincos_positions
from pospre.nn.positions.table import Table, resample_positions
from pospre.training.start_weights import load_weights
from tests.algorithms.cases import made
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.refusals import refuses
from tests.training.test_start_weights import small


def file_of(path: Path, **table: Any) -> Path:
    """Write a ViT of timm with a learned table, or with the one given."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"img_size": 64, "depth": 2, "num_classes": 0}
    vit: Any = timm.create_model("vit_tiny_patch16_224", **options)
    torch.save({**vit.state_dict(), **table}, path)
    return path


@pytest.mark.parametrize("positions", ["learned", "learned_sincos", {"learned": {}}])
def test_a_fixed_table_is_not_replaced_by_a_learned_one(tmp_path: Path, positions: Any) -> None:
    path = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", positions=positions))
    refuses(r"use encoder.positions=learned", lambda: load_weights(small(), str(path)))


def test_a_learned_table_of_a_file_is_not_frozen(tmp_path: Path) -> None:
    path = file_of(tmp_path / "vit.pth")
    for side in (64, 96):
        with pytest.raises(UserError, match=r"vit.pth has learned its own; use .*=learned"):
            load_weights(small(image_size=side), path)
        load_weights(small(image_size=side, positions="learned"), path)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_table_of_the_same_values_is_the_fixed_one(tmp_path: Path, kind: torch.dtype) -> None:
    """As in MAE's published files, with and without a row of the class token."""
    rows = sincos_positions(192, 4, 4)
    for table in (rows, torch.cat([torch.zeros(1, 192), rows])):
        path = file_of(tmp_path / "vit.pth", pos_embed=table[None].to(kind))
        model = small()
        line = load_weights(model, path)
        assert line.startswith(f"encoder: 30 of 30 tensors from {path}; images with ")
        found = model.encoder.positions.exported((4, 4))["pos_embed"][0, 1:]
        torch.testing.assert_close(found, rows, atol=4e-3, rtol=0)


def model_of(positions: str = "learned") -> pospre.PretrainModel:
    return small(positions=positions)


def test_a_field_starts_from_a_table_and_it_is_said(tmp_path: Path) -> None:
    path = file_of(tmp_path / "vit.pth")
    alone, model = model_of(), model_of()
    line = load_weights(alone, path)
    assert f"tensors from {path}; assumed: a grid of 4×4; images with" in line
    before = pospre.PretrainModel(alone.encoder, [made("mae"), CropField(field_size=20)])
    after = pospre.PretrainModel(model.encoder, [made("mae"), CropField(field_size=20)])
    assert "resampled: pos_embed 4×4 → 20×20" in load_weights(after, path)
    table = torch.load(path)["pos_embed"][0]
    for model in (before, after):
        positions = model.encoder.positions
        assert isinstance(positions, Table) and positions.grid == (20, 20)
        found = positions.pos_embed[0]
        assert torch.equal(found[:1], table[:1])  # the class token's
        assert torch.equal(found[1:], resample_positions(table[1:], (4, 4), (20, 20)))


def test_a_field_starts_from_the_table_of_a_wrapped_vit() -> None:
    vit: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    model = pospre.PretrainModel(vit, [CropField(field_size=20), made("mae")], seed=0)
    with torch.no_grad():  # read at the old cells, an enlarged table is about the old one
        found, expected = model.encoder.positions.exported((4, 4))["pos_embed"], vit.pos_embed
    assert F.cosine_similarity(found, expected, dim=-1).min() > 0.9


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        *(("learned", own) for own in ("rotary", "alibi", "lookhere", "relative", "none")),
        ("sincos", "rotary"),
        ("relative", "learned"),
        ("relative", "shared_relative"),
        ("shared_relative", "none"),
    ],
)
def test_positions_are_not_thrown_away_unless_asked_for(
    theirs: str, own: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "weights.pth", small(positions=own)
    weights = small(positions=theirs).timm_state()
    torch.save({key: each + 1e-5 for key, each in weights.items()}, path)
    before = {key: each.clone() for key, each in model.encoder.state_dict().items()}
    with pytest.raises(UserError, match=rf"positions = {own} has no place.*pth,positions=drop'"):
        load_weights(model, path)
    assert all(torch.equal(model.encoder.state_dict()[key], each) for key, each in before.items())
    line = load_weights(model, f"{path},positions=drop")
    assert f"tensors from {path}" in line and "left out: " in line
    for key, each in model.encoder.state_dict().items():
        assert torch.equal(each, before[key]) == key.startswith("positions."), key


def test_a_runs_positions_are_dropped_in_the_same_way(tmp_path: Path) -> None:
    run = save_checkpoint(tiny_recipe(tmp_path, "mae", positions="rotary")).parents[1]
    with pytest.raises(UserError, match=rf"with positions rotary, .*'{run},positions=drop'"):
        load_weights(small(positions="learned"), run)
    assert "; fresh: pos_embed" in load_weights(small(positions="learned"), f"{run},positions=drop")
    with pytest.raises(UserError, match=r"has positions = rotary; leave ',positions=…' out"):
        load_weights(small(positions="learned"), f"{run},positions=learned")


WIDE, OTHERS = [32, 128], ([64, 64], [128, 32], [48, 128])  # 2×8; 4×4, 8×2 and 3×8 patches


def sources(positions: str, folder: Path) -> tuple[pospre.PretrainModel, list[str]]:
    """Return a model on 2×8 patches, and what knows its grid: a run, exports, and the user."""
    recipe = tiny_recipe(folder, "mae", positions=positions, image_size=WIDE, depth=1)
    run = save_checkpoint(recipe)
    model = pospre.load_run(run)
    for name, format in (("e.pth", "timm"), ("e.safetensors", "safetensors")):
        export(str(run), folder / name, format=format)
    if positions == "sincos":
        model.encoder.positions.reset_parameters()  # the run's fixed table is noisy
    torch.save(model.timm_state(), folder / "plain.pth")
    names = ("e.pth", "e.safetensors", "plain.pth,grid=2x8")
    return model, [str(run), *(f"{folder}/{name}" for name in names)]


@pytest.mark.parametrize("positions", ["learned", "sincos", "relative", "shared_relative"])
def test_tables_are_resampled_from_the_grid_that_they_have(positions: str, tmp_path: Path) -> None:
    """Also if they have as many rows as the encoder's; expected are torch's and timm's results."""
    model, known = sources(positions, tmp_path)
    old = next(model.encoder.positions.parameters()).detach()
    for size in OTHERS:
        for address in known:
            other = small(positions=positions, image_size=size, depth=1)
            new, (rows, columns) = next(other.encoder.positions.parameters()), other.encoder.grid
            fresh = new.detach().clone()
            line = load_weights(other, address)
            assert f"2×8 → {rows}×{columns}" in line and "; assumed" not in line
            if positions == "sincos":
                expected = fresh
            elif positions == "learned":
                picture = old[:, 1:].mT.unflatten(2, (2, 8))
                picture = F.interpolate(picture, (rows, columns), mode="bicubic").flatten(2).mT
                expected = torch.cat([old[:, :1], picture], dim=1)
            else:
                shape = 3, 2 * rows - 1, 2 * columns - 1
                maps = old[:-3].T.reshape(3, 3, 15)
                maps = resize_rel_pos_bias_table(maps, (rows, columns), shape)
                expected = torch.cat([maps.reshape(3, -1).T, old[-3:]])
            torch.testing.assert_close(new.detach(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "own", "said"),
    [
        ("learned", [32, 128], r"'pos_embed' may be of 4×4 patches or of 2×8, as the encoder's"),
        ("learned", [64, 64], None),
        ("relative", [32, 128], r"relative_position_bias_table' \(48, 3\) is not square"),
        ("relative", [128, 32], r"relative_position_bias_table' \(48, 3\) is not square"),
    ],
)
def test_a_grid_that_nothing_shows_is_assumed_aloud_or_refused(
    positions: str, own: Any, said: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "plain.pth"
    torch.save(small(positions=positions, image_size=WIDE).timm_state(), path)
    model = small(positions=positions, image_size=own)
    before = {key: each.clone() for key, each in model.encoder.state_dict().items()}
    if said is None:
        assert "; assumed: a grid of 4×4; images with" in load_weights(model, path)
        return
    refuses(rf"{said}.*plain.pth,grid=", lambda: load_weights(model, path))
    assert all(torch.equal(model.encoder.state_dict()[key], each) for key, each in before.items())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (",grid=3x5", r"the grid of its tensor 'pos_embed' \(1, 17, 192\) is not 3×5"),
        (",grid=4", r"after grid= come rows and columns of patches, such as 7x28, not '4'"),
        (",heads=many", r"after heads= comes the number of attention heads, not 'many'"),
        (",heads=6", r"encoder.num_heads = 3, but .* has 6. The section"),
    ],
)
def test_what_is_said_of_a_file_must_fit(said: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_weights(small(positions="learned"), f"{file_of(tmp_path / 'vit.pth')}{said}")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("rotary", "; positions: alibi → rotary"),
        ({"alibi": {"slopes": "learned"}}, None),
        ("alibi", ""),
    ],
)
def test_a_change_of_schemes_that_no_tensor_shows_is_said(
    tmp_path: Path, own: Any, said: str | None
) -> None:
    path = tmp_path / "alibi.pth"
    torch.save(small(positions="alibi").encoder.state_dict(), path)
    if said is None:
        with pytest.raises(UserError, match=r"lacks the tensor 'positions.slope'"):
            load_weights(small(positions=own), f"{path},positions=alibi")
        return
    line = load_weights(small(positions=own), f"{path},positions=alibi")
    assert line.startswith(f"encoder: 29 of 29 tensors from {path}{said}; images with ")
