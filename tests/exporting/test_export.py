"""Export: timm loads every tensor strictly and computes our features; nothing is half-written."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pospre.export import main
from pospre.exporting import timm_file
from pospre.exporting.export import export
from pospre.training.build import load_model
from tests.evaluation.checkpoints import printed_model, save_checkpoint, tiny_recipe
from tests.refusals import fails


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tiny_recipe(tmp_path_factory.mktemp("runs"), "mae"))


def images_for(encoder, count=3):
    return torch.rand(count, 3, *encoder.image_size, generator=torch.Generator().manual_seed(1))


def assert_same_features(checkpoint, model):
    encoder = load_model(str(checkpoint))[0].encoder
    for key, tensor in encoder.state_dict().items():
        assert torch.equal(model.state_dict()[encoder.timm_name_of(key)], tensor), key
    images = images_for(encoder)
    with torch.no_grad():
        ours, theirs = encoder(images), model.forward_features(images)
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("ending", "num_classes"), [("pth", None), ("safetensors", 0), ("pth", 10)]
)
def test_printed_line_loads_every_tensor(checkpoint, tmp_path, ending, num_classes):
    out = tmp_path / f"encoder.{ending}"
    lines = export(str(checkpoint), out, format="timm", num_classes=num_classes)
    model = printed_model(lines)
    assert_same_features(checkpoint, model)
    classes = 1000 if num_classes is None else num_classes
    assert model.num_classes == classes
    if classes:
        assert not model.get_classifier().weight.any()
    assert ("num_classes" in "\n".join(lines)) == (num_classes is not None)


@pytest.mark.parametrize(
    "encoder", [{"image_size": 48, "patch_size": 8}, {"name": "vits16", "depth": 1}]
)
def test_other_shapes_are_in_the_printed_line(tmp_path, encoder):
    checkpoint = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", **encoder))
    lines = export(str(checkpoint), tmp_path / "encoder.pth", format="timm")
    assert_same_features(checkpoint, printed_model(lines))


def test_standard_encoder_loads_with_two_arguments(tmp_path):
    standard = {"image_size": 224, "depth": None, "name": "vit_tiny16"}
    checkpoint = save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", **standard))
    out = tmp_path / "encoder.pth"
    lines = export(str(checkpoint), out, format="timm")
    call = f"model = timm.create_model('vit_tiny_patch16_224', checkpoint_path={str(out)!r})"
    assert call in lines
    assert_same_features(checkpoint, printed_model(lines))
    assert set(torch.load(out, weights_only=True)) == set(
        timm.create_model("vit_tiny_patch16_224").state_dict()
    )


def test_safetensors_holds_the_bare_encoder_and_its_story(checkpoint, tmp_path):
    out = tmp_path / "encoder.safetensors"
    lines = export(str(checkpoint), out, format="safetensors")
    model, recipe = load_model(str(checkpoint))
    assert set(load_file(out)) == {*map(model.encoder.timm_name_of, model.encoder.state_dict())}
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["recipe"]) == recipe.dump()
    assert metadata["timm_name"] == "vit_tiny_patch16_224"
    kwargs = json.loads(metadata["timm_kwargs"])
    assert kwargs == {"img_size": 64, "depth": 2, "num_classes": 0}
    assert json.loads(metadata["mean"]) == pytest.approx([0.485, 0.456, 0.406])
    assert_same_features(checkpoint, printed_model(lines))


def test_existing_file_is_kept_without_overwrite(checkpoint, tmp_path, capsys):
    out = tmp_path / "encoder.pth"
    out.write_text("precious")
    arguments = [checkpoint, out, "--format", "timm"]
    assert "--overwrite" in fails(main, capsys, *arguments)
    assert out.read_text() == "precious"
    assert main([str(argument) for argument in [*arguments, "--overwrite"]]) == 0
    assert "timm.create_model('vit_tiny_patch16_224'" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.pth", "encoder.pth.md"]


def test_full_disk_leaves_nothing(checkpoint, tmp_path, capsys, monkeypatch):
    def write_half(_, path: Path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timm_file, "write", write_half)
    out = tmp_path / "encoder.pth"
    assert "No space left" in fails(main, capsys, checkpoint, out, "--format", "timm")
    assert not list(tmp_path.iterdir())
