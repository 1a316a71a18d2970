"""Positions when training starts from weights: they fit, or a message says what is lost."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

import pospre
from pospre.errors import UserError
from pospre.nn.positions.sincos import sincos_positions
from pospre.nn.positions.table import Table, resample_positions
from pospre.training.start_weights import load_weights
from tests.algorithms.cases import DECODER
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
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
    with pytest.raises(UserError, match=r"use encoder.positions=learned"):
        load_weights(small(), str(path))


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
        assert "; " not in line.replace(str(path), "")
        found = model.encoder.positions.exported((4, 4))["pos_embed"][0, 1:]
        torch.testing.assert_close(found, rows, atol=4e-3, rtol=0)


def model_of(positions: str = "learned") -> pospre.PretrainModel:
    model = small(positions=positions)
    pospre.attach(model, "mae", **DECODER)
    return model


def test_a_field_starts_from_a_table_in_either_order_and_it_is_said(tmp_path: Path) -> None:
    path = file_of(tmp_path / "vit.pth")
    before, after = model_of(), model_of()
    line = load_weights(before, path)
    assert "; " not in line.replace(str(path), "")
    pospre.attach(before, "crop_field", field_size=20)
    pospre.attach(after, "crop_field", field_size=20)
    assert "resampled: pos_embed 1×17×192 → 1×401×192" in load_weights(after, path)
    table = torch.load(path)["pos_embed"][0]
    for model in (before, after):
        positions = model.encoder.positions
        assert isinstance(positions, Table) and positions.grid == (20, 20)
        found = positions.pos_embed[0]
        assert torch.equal(found[:1], table[:1])  # the class token's
        assert torch.equal(found[1:], resample_positions(table[1:], (4, 4), (20, 20)))


def test_a_field_starts_from_the_table_of_a_wrapped_vit() -> None:
    vit: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    model = pospre.PretrainModel(pospre.wrap_encoder(vit), seed=0)
    pospre.attach(model, "mae", **DECODER)
    pospre.attach(model, "crop_field", field_size=20)
    with torch.no_grad():  # read at the old cells, an enlarged table is about the old one
        found, expected = model.encoder.positions.exported((4, 4))["pos_embed"], vit.pos_embed
    assert F.cosine_similarity(found, expected, dim=-1).min() > 0.9


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
    assert line == f"encoder: 29 of 29 tensors from {path}{said}"
