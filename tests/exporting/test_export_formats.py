"""Folders for transformers, and ONNX graphs: their software has our features."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel

from pospre.errors import UserError
from pospre.exporting import export as export_module
from pospre.exporting import onnx_file
from pospre.exporting.export import export
from pospre.recipe.recipe import recipe_from_dict
from pospre.training.build import load_model
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe

CLASSES = ["bird", "cat", "dog", "elk", "löwe"]
SCALED = {"layer_scale": 0.1}
REGISTERS = {"num_registers": 2}
NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("ViTModel", {}),
    ("ViTModel", {"positions": "none"}),
    ("ViTModel", {"image_size": [48, 80], "positions": "learned"}),
    ("IJepaModel", {"class_token": False}),
    ("Dinov2Model", SCALED),
    ("Dinov2Model", {"name": "vitg14", "image_size": 28, "patch_size": 14, "depth": 1}),
    ("Dinov2WithRegistersModel", REGISTERS),
    ("Dinov2WithRegistersModel", {**SCALED, **REGISTERS, "positions": "learned"}),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_recipe(tmp_path_factory.mktemp("runs"), "mae"))


def classifier(runs: Path, **encoder: Any) -> Path:
    """Save a run of ``supervised``, which takes every encoder."""
    plain = tiny_recipe(runs, "mae", **encoder).dump()
    plain["algorithms"] = {"supervised": {"num_classes": 5, "pooling": "mean"}}
    return save_checkpoint(recipe_from_dict(plain), classes=CLASSES)


@torch.no_grad()
def tokens_of(checkpoint: Path, count: int = 2) -> tuple[Tensor, Tensor]:
    """Return images and our tokens of them."""
    model = load_model(str(checkpoint))[0]
    shape = count, model.encoder.channels, *model.encoder.image_size
    images = torch.rand(*shape, generator=torch.Generator().manual_seed(1))
    return images, model.encoder(images)


@torch.no_grad()
def logits_of(checkpoint: Path) -> tuple[Tensor, Tensor]:
    """Return images and our logits of them."""
    images, tokens = tokens_of(checkpoint)
    head = load_model(str(checkpoint))[0].objectives["supervised"]
    return images, head({"student": tokens}, {})["logits"]


def assert_ours(found: Tensor, ours: Tensor) -> None:
    assert found.shape == ours.shape
    assert F.cosine_similarity(found, ours, dim=-1).min() >= 0.99999
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("network", "encoder"), NETWORKS)
def test_transformers_load_every_tensor(
    tmp_path: Path, network: str, encoder: dict[str, Any]
) -> None:
    path = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", **encoder))
    out = tmp_path / "hf"
    lines = export(str(path), out, format="hf")
    model, info = AutoModel.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == network and network in "\n".join(lines)
    assert not any(info.values())
    images, ours = tokens_of(path)
    with torch.no_grad():
        found = model.eval()(pixel_values=images)
    assert_ours(found.last_hidden_state, ours)
    if network != "IJepaModel":
        torch.testing.assert_close(found.pooler_output, found.last_hidden_state[:, 0])
    assert sorted(each.name for each in out.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "preprocessor_config.json",
    ]  # fmt: skip


def test_the_image_processor_makes_our_centre_view(checkpoint: Path, tmp_path: Path) -> None:
    export(str(checkpoint), tmp_path / "hf", format="hf")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "hf")
    grey = np.full((100, 130, 3), 51, dtype=np.uint8)
    pixels = processor(grey, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 64, 64) and processor.size["shortest_edge"] == 73
    expected = [(0.2 - mean) / std for mean, std in ((0.485, 0.229), (0.456, 0.224))]
    assert pixels[0, :2, 5, 5].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("encoder", [{}, {"positions": "none", "channels": 2}, REGISTERS])
def test_onnxruntime_runs_batches_of_any_size(tmp_path: Path, encoder: dict[str, Any]) -> None:
    path = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", **encoder))
    out = tmp_path / "encoder.onnx"
    lines = export(str(path), out, format="onnx")
    for count in (1, 3):
        images, ours = tokens_of(path, count)
        scope: dict[str, Any] = {"images": images.numpy()}
        exec("\n".join(lines[lines.index("import onnxruntime") :]), scope)  # as a user would
        assert_ours(torch.from_numpy(scope["tokens"]), ours)
    graph = onnx.load(out)
    assert [each.version for each in graph.opset_import if not each.domain] == [17]
    said = {each.key: each.value for each in graph.metadata_props}
    assert json.loads(said["recipe"]) == load_model(str(path))[1].dump()


@torch.no_grad()
def test_a_trained_classifier_goes_along(tmp_path: Path) -> None:
    path, out = classifier(tmp_path / "runs"), tmp_path / "vit.onnx"
    images, ours = logits_of(path)
    assert "features and logits" in "\n".join(export(str(path), out, format="onnx"))
    found = onnxruntime.InferenceSession(out).run(["logits"], {"images": images.numpy()})[0]
    assert_ours(torch.from_numpy(found), ours)
    said = {each.key: each.value for each in onnx.load(out).metadata_props}
    assert json.loads(said["classes"]) == CLASSES
    for format, name in (("timm", "vit.pth"), ("safetensors", "vit.safetensors")):
        export(str(path), tmp_path / name, format=format)
        has_head = format == "timm"
        assert (json.dumps(CLASSES) in (tmp_path / f"{name}.md").read_text()) == has_head


def test_relative_positions_have_a_graph_too(tmp_path: Path) -> None:
    path = classifier(tmp_path / "runs", positions="shared_relative")
    assert "are ours" in "\n".join(export(str(path), tmp_path / "e.onnx", format="onnx"))


def test_a_folder_is_replaced_only_if_it_is_an_export(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    export(str(checkpoint), out, format="hf")
    with pytest.raises(UserError, match="--overwrite replaces it"):
        export(str(checkpoint), out, format="hf")
    (out / "config.json").write_text("old")
    export(str(checkpoint), out, format="hf", overwrite=True)
    assert "ViTModel" in (out / "config.json").read_text()
    (out / "notes.txt").write_text("precious")
    with pytest.raises(UserError, match=r"of another kind, such as notes\.txt"):
        export(str(checkpoint), out, format="hf", overwrite=True)
    with pytest.raises(UserError, match="is a file; --format hf writes a folder"):
        export(str(checkpoint), out / "notes.txt", format="hf", overwrite=True)
    assert (out / "notes.txt").read_text() == "precious"
    assert [each.name for each in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("format", "name"), [("timm", "out.pth"), ("hf", "out"), ("onnx", "out.onnx")]
)
def test_other_features_are_not_given_out(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, name: str
) -> None:
    kind = export_module._FORMATS[format]
    compute = kind.compute

    def another(*arguments: Any) -> tuple[str, dict[str, Tensor]]:
        reader, outputs = compute(*arguments)
        return reader, {key: value + 2e-4 * value.abs().max() for key, value in outputs.items()}

    monkeypatch.setattr(kind, "compute", another)
    with pytest.raises(RuntimeError, match="computes other features"):
        export(str(checkpoint), tmp_path / name, format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("format", "module", "extra"), [("hf", "transformers", "hf"), ("onnx", "onnx", "onnx")]
)
def test_a_missing_extra_is_named(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    module: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=re.escape(f"{Path.cwd()}[{extra}]")):
        export(str(checkpoint), tmp_path / "out.onnx", format=format)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_one_file_cannot_hold(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "_LIMIT", 1000)
    with pytest.raises(UserError, match="Use the format safetensors, timm or hf"):
        export(str(checkpoint), tmp_path / "out.onnx", format="onnx")
    assert not list(tmp_path.iterdir())
