"""Weights of others, converted: a file in a published layout comes out as every format."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModel, Dinov2Config, Dinov2Model

from pospre.errors import UserError
from pospre.evaluation.models import open_model, subject_of
from pospre.exporting import export as export_module
from pospre.exporting import hf_folder, timm_file
from pospre.exporting.export import export
from pospre.exporting.timm_encoder import take_parts
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.foreign import Shown
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe

SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1}
FOREIGN: list[tuple[str, dict[str, Any]]] = [
    ("vit_tiny_patch16_224", {}),
    ("vit_tiny_patch16_224", {"reg_tokens": 2, "init_values": 0.3}),
    ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "in_chans": 1}),
    ("beit_base_patch16_224", {"num_heads": 3, "global_pool": "token"}),
]


@torch.no_grad()
def test_their_own_layout_comes_back(tmp_path: Path) -> None:
    """Save timm's ViT with layer scale and read it as transformers' Dinov2Model."""
    size: dict[str, Any] = {"img_size": 56, "depth": 2, "num_classes": 0}
    vit: Any = timm.create_model("vit_small_patch14_dinov2", init_values=1.0, **size).eval()
    for parameter in vit.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    file, out = tmp_path / "theirs.pth", tmp_path / "hf"
    torch.save(vit.state_dict(), file)
    lines = export(str(file), out, format="hf")
    assert any("tensors from" in line for line in lines)
    model = AutoModel.from_pretrained(out).eval()
    assert isinstance(model, Dinov2Model) and isinstance(model.config, Dinov2Config)
    images = torch.rand(2, 3, 56, 56)
    found, theirs = model(pixel_values=images).last_hidden_state, vit.forward_features(images)
    assert F.cosine_similarity(found, theirs, dim=-1).min() >= 0.99999
    text = (out / "README.md").read_text()
    assert "# theirs.pth" in text and "By others" in text and "## Recipe" not in text
    assert "that of their authors" in text


def test_an_export_becomes_another_format(tmp_path: Path) -> None:
    path = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae"))
    first, second = tmp_path / "one.safetensors", tmp_path / "two.pth"
    export(str(path), first, format="safetensors")
    export(str(first), second, format="timm")
    ours = torch.load(second, weights_only=True)
    saved = read_checkpoint(str(path)).content["state"]["model"]
    assert torch.equal(ours["blocks.1.mlp.fc1.weight"], saved["encoder.blocks.1.mlp.fc1.weight"])


@pytest.mark.parametrize("format", ["safetensors", "timm"])
@pytest.mark.parametrize(("name", "options"), FOREIGN)
def test_an_export_of_foreign_weights_is_read_back(
    name: str, options: dict[str, Any], format: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    theirs: Any = timm.create_model(name, num_classes=0, **{**SMALL, **options})
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    before = open_model(str(tmp_path / "theirs.safetensors"))
    export(str(tmp_path / "theirs.safetensors"), tmp_path / "ours.safetensors", format=format)
    after = open_model(str(tmp_path / "ours.safetensors"))
    images = torch.randn(2, before.model.encoder.channels, 32, 32)
    tokens = [each.model.eval().encoder(images) for each in (before, after)]
    torch.testing.assert_close(*tokens, rtol=0, atol=1e-6)
    assert before.recipe.encoder == after.recipe.encoder
    larger = open_model(str(tmp_path / "ours.safetensors"), shown=Shown((48, 48)))
    assert larger.model.encoder.grid == (6, 6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "lacking"),
    [
        ("vit_tiny_patch16_224", {"qkv_bias": False}, None),
        ("vit_tiny_patch16_224", {"qk_norm": True}, r"a tensor 'blocks.0.attn.q_norm.weight'"),
        ("vit_tiny_patch16_224", {"act_layer": "quick_gelu"}, "the activation quick_gelu"),
        ("vit_base_patch16_clip_224", {"num_heads": 3}, r"a tensor 'norm_pre.weight'"),
    ],
)
def test_parts_of_a_vit_that_few_have(
    name: str, options: dict[str, Any], lacking: str | None, tmp_path: Path
) -> None:
    """All go to timm, and to transformers those that these have."""
    torch.manual_seed(1)
    subject = subject_of(timm.create_model(name, num_classes=0, **{**SMALL, **options}))
    parts = take_parts(subject.model, subject.recipe, format="hf", num_classes=None, grid=None)
    images = parts.sample_images(2)
    ours = parts.outputs(images)["tokens"]

    def compare(format: Any, file: Path) -> None:
        format.write(parts, file)
        torch.testing.assert_close(
            format.compute(parts, file, images)[1]["tokens"], ours, rtol=0, atol=1e-4
        )

    compare(timm_file, tmp_path / "encoder.pth")
    if lacking is None:
        compare(hf_folder, tmp_path / "hf")
        return
    with pytest.raises(UserError, match=f"no model of transformers has {lacking}; use the format"):
        hf_folder.write(parts, tmp_path / "hf")


def test_an_export_keeps_how_the_positions_of_its_family_are_resampled(tmp_path: Path) -> None:
    torch.manual_seed(1)
    vit: Any = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL)
    dinov2 = vit.state_dict() | {"mask_token": torch.ones(1, vit.embed_dim)}
    save_file(dinov2, tmp_path / "theirs.safetensors")
    export(
        str(tmp_path / "theirs.safetensors"), tmp_path / "ours.safetensors", format="safetensors"
    )
    before, after = (
        open_model(str(tmp_path / name), shown=Shown((48, 24))).model.eval()
        for name in ("theirs.safetensors", "ours.safetensors")
    )
    images = torch.randn(2, 3, 48, 24)
    assert torch.equal(before.encoder(images), after.encoder(images))
    assert after.encoder.positions.resampling == "offset"


def sharp(path: Path) -> Path:
    """Write a ViT whose softmax magnifies rounding a thousand times."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"img_size": 64, "depth": 8, "num_classes": 0}
    vit: Any = timm.create_model("vit_tiny_patch16_224", **options)
    with torch.no_grad():
        for block in vit.blocks:
            block.attn.qkv.weight[:384] *= 100
        for parameter in vit.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    torch.save(vit.state_dict(), path)
    return path


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_sharp_attention_is_judged_by_its_own_rounding(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sharp(tmp_path / "sharp.pth")
    lines = export(str(file), tmp_path / "out.pth", format=format)
    (checked,) = (line for line in lines if line.startswith("checked:"))
    assert float(checked.partition("relative difference ")[2].partition(",")[0]) > 1e-5
    monkeypatch.setattr(export_module, "COSINE", 1.1)
    with pytest.raises(UserError, match=r"rounding alone moves them .* Nothing was written"):
        export(str(file), tmp_path / "again.pth", format=format)
    assert not (tmp_path / "again.pth").exists()
