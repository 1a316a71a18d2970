"""What becomes of the positions when a training starts from weights: they fit, or it is said."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import pospre
from pospre.errors import UserError
from pospre.nn.positions.sincos import sincos_positions
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


def test_a_fixed_table_is_not_replaced_by_a_learned_one(tmp_path: Path) -> None:
    path = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", positions="learned"))
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
        found = model.encoder.state_dict()["pos_embed"][0, 1:]
        torch.testing.assert_close(found, rows, atol=4e-3, rtol=0)


def model_of(positions: str = "learned") -> pospre.PretrainModel:
    model = small(positions=positions)
    pospre.attach(model, "mae", **DECODER)
    return model


def test_weights_before_crop_field_lose_their_table_and_it_is_said(tmp_path: Path) -> None:
    path = file_of(tmp_path / "vit.pth")
    model = model_of()
    load_weights(model, path)
    with pytest.warns(UserWarning, match=r"those of .*vit.pth are lost, only the class token"):
        pospre.attach(model, "crop_field")
    wrapped = pospre.wrap_encoder(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1))
    model = pospre.PretrainModel(wrapped, seed=0)
    pospre.attach(model, "mae", **DECODER)
    with pytest.warns(UserWarning, match=r"those of the ViT of timm are lost"):
        pospre.attach(model, "crop_field")
    with warnings.catch_warnings(action="error"):
        pospre.attach(model_of(), "crop_field")  # of a table that was drawn here


def test_crop_field_before_weights_keeps_its_table_empty_and_it_is_said(tmp_path: Path) -> None:
    path = file_of(tmp_path / "vit.pth")
    model = model_of()
    pospre.attach(model, "crop_field")
    line = load_weights(model, path)
    assert "fresh: the positions of crop_field" in line
    assert "not used: the rows of patches in pos_embed" in line
    table = model.encoder.state_dict()["pos_embed"][0]
    assert not table[1:].any()
    assert torch.equal(table[0], torch.load(path)["pos_embed"][0, 0])
