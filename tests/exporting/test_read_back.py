"""Every export is read back as it was, by every door, or refused; what is guessed is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.models import Subject, open_model
from pospre.exporting.export import export
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.positions import SCHEMES
from pospre.training.build import load_model
from pospre.training.start_weights import load_weights
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe

WIDE: dict[str, Any] = {"image_size": [32, 48], "patch_size": 8, "num_heads": 6}
POSITIONS: list[Any] = [
    *SCHEMES,
    {"rotary": {"base": 200.0}},
    {"rotary": {"coordinates": "cells", "columns_first": True}},
    {"rotary": {"coordinates": "cells", "directions": 4}},
    {"learned_rotary": {"rotation": {"rotary": {"coordinates": "cells", "directions": "golden"}}}},
    {"learned_rotary": {"rotation": "rotary_mixed"}},
]
FORMATS = {"timm": "e.pth", "safetensors": "e.safetensors", "hf": "e"}
CLASSIFIER = {"supervised": {"num_classes": 3}}
LACKING = ("no model of transformers has", "timm, which has no such model")


def read_back(file: Path, positions: Any, **options: Any) -> tuple[Subject, PretrainModel]:
    """Return the model of ``--model``, and one that starts from the file."""
    subject = open_model(str(file))
    encoder = build_encoder("vit_tiny16", depth=2, positions=positions, **options)
    model = PretrainModel(encoder, seed=1)
    load_weights(model, file)
    return subject, model.eval()


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_every_export_is_read_back_by_every_door(positions: Any, tmp_path: Path) -> None:
    run = save_checkpoint(tiny_recipe(tmp_path, CLASSIFIER, positions=positions, **WIDE))
    ours = load_model(str(run))[0].encoder
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    for format, name in FORMATS.items():
        out = tmp_path / name
        try:
            export(str(run), out, format=format)
        except UserError as error:
            assert any(words in str(error) for words in LACKING) and not out.exists()
            continue
        subject, started = read_back(out, positions, **WIDE)
        assert "assumed" not in subject.origin and subject.recipe.encoder.num_heads == 6
        for model in (subject.model.eval(), started):
            close(model.encoder(images), ours(images))


@pytest.mark.parametrize(
    "encoder",
    [
        {"positions": "alibi"},
        {"positions": {"rotary": {"normalize": "max"}}},
        {"num_registers": 2, "gated_registers": 1},
    ],
)
@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_what_timm_lacks_is_written_as_our_own_model(
    format: str, encoder: dict[str, Any], tmp_path: Path
) -> None:
    """The export itself compares what it wrote with ours."""
    run = save_checkpoint(tiny_recipe(tmp_path, CLASSIFIER, **encoder))
    checked = export(str(run), tmp_path / f"e.{format}", format=format)[1]
    reader = "pospre loads all" if format == "safetensors" else "onnxruntime"
    assert reader in checked and ("logits" in checked) == (format == "onnx")


def test_a_graph_is_no_file_of_weights(tmp_path: Path) -> None:
    run, out = save_checkpoint(tiny_recipe(tmp_path, CLASSIFIER)), tmp_path / "e.onnx"
    export(str(run), out, format="onnx")
    for read in (
        open_model,
        lambda file: load_weights(PretrainModel(build_encoder("vit_tiny16"), seed=0), file),
    ):
        with pytest.raises(UserError, match=r"e.onnx holds no checkpoint"):
            read(str(out))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
