"""Files that do not say how their encoder knows places are refused, and nothing is assumed."""

from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from pospre.evaluation.models import open_model
from pospre.exporting.export import export
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.training.start_weights import load_weights

SMALL: dict[str, Any] = {"embed_dim": 192, "num_heads": 3, "depth": 1, "num_classes": 0}


def model_of(**options: Any) -> PretrainModel:
    chosen = {"image_size": 64, "depth": 1, **options}
    return PretrainModel(build_encoder("vit_tiny16", **chosen), seed=0)


def plain(**changes: Tensor) -> dict[str, Tensor]:
    vit: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, **SMALL)
    return {**vit.state_dict(), **changes}


def test_a_file_without_positions_is_taken_when_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    torch.save({key: value for key, value in plain().items() if key != "pos_embed"}, path)
    told = f"{path},positions=none"
    subject = open_model(told)
    assert subject.recipe.encoder.positions == "none"
    assert f"17 of 17 tensors from {path};" in subject.origin
    assert "; fresh: pos_embed" in load_weights(model_of(positions="learned"), told)
    export(told, tmp_path / "out.safetensors", format="safetensors")
    again = open_model(str(tmp_path / "out.safetensors"))
    images = torch.randn(2, 3, *subject.model.encoder.image_size)
    torch.testing.assert_close(
        again.model.eval().encoder(images), subject.model.eval().encoder(images)
    )
