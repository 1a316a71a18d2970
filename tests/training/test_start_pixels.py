"""Images are normalised as the weights expect, through every door, and a line says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import pospre
from pospre.errors import UserError
from pospre.evaluation.models import open_model
from pospre.exporting.export import export
from pospre.nn.build import build_encoder
from pospre.training.start_weights import load_weights
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.training.test_start_positions import file_of
from tests.training.test_start_weights import small

HALF = "images with mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5"
IMAGENET = "images with mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225"


def run_of(folder: Path) -> Path:
    """Save a run of other pixels than ImageNet's."""
    recipe = tiny_recipe(folder, "mae")
    pixels = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    data = recipe.data.model_copy(update=pixels)
    return save_checkpoint(recipe.model_copy(update={"data": data}))


def pixels_of(model: pospre.PretrainModel) -> list[float]:
    return [*model.augment.mean.flatten().tolist(), *model.augment.std.flatten().tolist()]


@pytest.mark.parametrize("kind", ["run", "e.pth", "e.safetensors", "e"])
def test_a_run_and_its_exports_give_their_pixels(kind: str, tmp_path: Path) -> None:
    source = run = run_of(tmp_path)
    if kind != "run":
        format = {"e": "hf", "e.pth": "timm"}.get(kind, "safetensors")
        export(str(run), tmp_path / kind, format=format)
        source = tmp_path / kind / "model.safetensors" if kind == "e" else tmp_path / kind
        assert (
            "mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5 (the weights')" in open_model(str(source)).origin
        )
    model = small()
    assert load_weights(model, source).endswith(f"; {HALF} (the weights')")
    assert pixels_of(model) == [0.5] * 6
    chosen = pospre.PretrainModel(small().encoder, seed=0, mean=[0.4] * 3)
    assert load_weights(chosen, source).endswith(
        "; images with mean 0.4, 0.4, 0.4 (given; the weights expect 0.5, 0.5, 0.5), "
        "std 0.5, 0.5, 0.5 (the weights')"
    )
    assert chosen.augment.mean.flatten().tolist() == pytest.approx([0.4] * 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:vit_tiny_patch16_224", f"{HALF} (timm's)"),
        ("vit_tiny16", f"{IMAGENET} (ImageNet's, assumed)"),
    ],
)
def test_a_file_has_the_pixels_of_the_timm_model_that_is_named(
    name: str, said: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path / "vit.pth")
    encoder = build_encoder(name, depth=2, image_size=64, positions="learned")
    assert load_weights(pospre.PretrainModel(encoder, seed=0), path).endswith(f"; {said}")
    vit: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    vit.pretrained_cfg["mean"] = (0.1, 0.2, 0.3)
    line = load_weights(pospre.PretrainModel(vit, seed=0), path)
    assert "images with mean 0.1, 0.2, 0.3, std 0.5, 0.5, 0.5 (timm's)" in line


def test_the_description_beside_a_file_of_a_hub_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    export(str(run_of(tmp_path)), folder, format="hf")
    with_header = open_model(str(folder / "model.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})  # as others write it
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6}))
    found = open_model(str(folder / "model.safetensors"))
    assert "; assumed: positions learned; " in found.origin
    assert "std 0.5, 0.5, 0.5 (the weights')" in found.origin
    assert found.recipe.encoder.num_heads == 6
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        ours, other = (each.model.eval().encoder(images) for each in (with_header, found))
    assert (ours - other).abs().max() > 0.01
    with pytest.raises(UserError, match=r"encoder.num_heads = 3, but .* has 6. The section"):
        load_weights(small(positions="learned"), folder / "model.safetensors")
    for theirs, ours in (("quick_gelu", "quick_gelu"), ("gelu_new", "gelu_tanh")):
        (folder / "config.json").write_text(json.dumps({**config, "hidden_act": theirs}))
        with pytest.raises(
            UserError, match=rf"the activation {ours}, and the encoder has gelu; us"
        ):
            open_model(str(folder / "model.safetensors"))
    (folder / "config.json").write_text('{"num_attention_heads": "many"}')
    with pytest.raises(UserError, match=r"hub/config.json beside the weights cannot be read"):
        open_model(str(folder / "model.safetensors"))
