"""Encoders of every scheme of positions: exported and read back, or refused before any writing."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pospre.errors import run_command
from pospre.evaluation.models import open_model
from pospre.export import main
from pospre.exporting.export import export
from pospre.training.build import load_model
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.nn.weights.test_eva import redrawn

CLASSIFIER = {"supervised": {"num_classes": 3}}


@pytest.mark.parametrize(
    "positions",
    [
        "rotary",
        {"rotary": {"coordinates": "cells"}},
        "rotary_mixed",
        {"learned_rotary": {"rotation": "rotary_mixed"}},
    ],
)
@torch.no_grad()
def test_the_graph_of_a_rotary_encoder_is_of_any_one_image_size(
    positions: Any, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path / "runs", CLASSIFIER, positions=positions, image_size=32)
    path = save_checkpoint(recipe)
    model = load_model(str(path))[0].eval()
    for grid in (None, "3x5"):
        out = tmp_path / f"{grid}.onnx"
        export(str(path), out, format="onnx", grid=grid)
        rows, columns = (2, 2) if grid is None else (int(grid[0]), int(grid[2]))
        images = torch.randn(2, 3, 16 * rows, 16 * columns)
        session = onnxruntime.InferenceSession(out)
        found = torch.from_numpy(session.run(["tokens"], {"images": images.numpy()})[0])
        assert F.cosine_similarity(found, model.encoder(images), dim=-1).min() >= 0.99999
        places = model.encoder.places_of(images)
        nowhere = places.forget(torch.ones(1, rows * columns, dtype=torch.bool))
        other = model.encoder(images, places=nowhere)
        assert F.cosine_similarity(found, other, dim=-1).min() < 0.999, "places are not felt"


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3"])
def test_dinov3_comes_back_from_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit = redrawn(timm.create_model(name, depth=2, num_classes=0)).float()
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    arguments = [str(tmp_path / "vit.safetensors"), str(tmp_path / "hf"), "--format", "hf"]
    assert run_command(lambda: main(arguments)) == 0
    assert "of the DINOv3ViTModel" in capsys.readouterr().out
    again = open_model(str(tmp_path / "hf" / "model.safetensors")).model.eval()
    images = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            again.encoder(images), vit.forward_features(images), rtol=1e-4, atol=1e-4
        )
