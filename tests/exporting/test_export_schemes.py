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
from tests.nn.test_eva import redrawn

CLASSIFIER = {"supervised": {"num_classes": 3}}


def run_of(scheme: str, folder: Path) -> Path:
    recipe = tiny_recipe(folder, CLASSIFIER, positions=scheme, image_size=32, depth=1)
    return save_checkpoint(recipe)


@pytest.mark.parametrize(
    ("format", "name"),
    [("timm", "e.pth"), ("safetensors", "e.safetensors"), ("hf", "e"), ("onnx", "e.onnx")],
)
def test_what_timm_does_not_have_is_refused_in_every_format(
    format: str,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = run_of("alibi", tmp_path / "runs")
    code = run_command(lambda: main([str(path), str(tmp_path / name), "--format", format]))
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: encoder.positions = alibi cannot be exported")
    assert "none, sincos, learned" in said and "through its run or checkpoint" in said
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


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


@pytest.mark.parametrize("format", ["timm", "onnx"])
def test_a_grid_that_positions_do_not_know_is_refused(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name = run_of("relative", tmp_path / "runs"), {"timm": "e.pth", "onnx": "e.onnx"}[format]
    arguments = [str(path), str(tmp_path / name), "--format", format, "--grid", "3x5"]
    assert run_command(lambda: main(arguments)) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: --grid 3x5 needs positions that take any grid, but encoder.positions = "
        "relative takes a grid of 2x2 only. Leave out --grid.\n"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]


def test_rotary_options_that_timm_lacks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (key, value) in enumerate((("normalize", "max"), ("bf16_periods", True))):
        positions = {"rotary": {key: value}}
        recipe = tiny_recipe(
            tmp_path / f"runs{number}", CLASSIFIER, positions=positions, image_size=32, depth=1
        )
        path, out = save_checkpoint(recipe), tmp_path / "encoder.pth"
        code = run_command(lambda: main([str(path), str(out), "--format", "timm"]))  # noqa: B023
        said = capsys.readouterr().err
        assert code == 2 and f"positions.rotary.{key} cannot be exported" in said
        assert ("exact periods" in said) is (key == "bf16_periods")
        assert not out.exists()


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
