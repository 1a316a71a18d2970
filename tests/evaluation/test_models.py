"""Any ViT is measured: files of weights, timm's models, and models made in code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import pospre
from pospre import evaluate
from pospre.errors import UserError, run_command
from pospre.evaluation.layers import blank_encoder
from pospre.evaluation.models import open_beside, open_model, subject_of
from pospre.exporting.export import export
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.swin.encoder import SWIN_NEEDS
from pospre.run.checkpoints.reading import open_checkpoint
from pospre.run.resume import recorded
from pospre.training.build import model_of
from pospre.training.foreign import Shown
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.refusals import refuses

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return ``run(*arguments)``: the command's exit code, and what it said and complained of."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = run_command(lambda: evaluate.main([str(argument) for argument in arguments]))
        except SystemExit as stopped:  # argparse
            code = int(stopped.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def tiny_timm(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make timm's tiny ViT one of a block, and return its name."""
    create: Any = timm.create_model

    def small(name: str, **options: Any) -> Any:
        fewer = {"depth": 1} if name.startswith("vit_tiny") else {}
        return create(name, **{**fewer, **options})

    monkeypatch.setattr(timm, "create_model", small)
    return "vit_tiny_patch16_224"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a file of a ViT that timm made."""
    torch.manual_seed(3)
    vit: Any = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TINY)
    path = tmp_path / "weights" / "vit.safetensors"
    path.parent.mkdir()
    save_file(vit.state_dict(), path)
    return path


def test_a_file_is_measured_beside_its_random_twin(
    run: Run, weights: Path, image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    data, output = image_folder(num_images=6), tmp_path / "knn.json"
    common = ["knn", "--model", weights, "--data", data, "k=2"]
    code, said, complained = run(*common, "--output", output)
    assert code == 0 and "untrained" in said
    assert f"18 of 18 tensors from {weights}; assumed: 3 heads, a grid of 4×4, pos" in complained
    assert "; images of 32×32 pixels, mean 0.485" in complained
    document = json.loads(output.read_text())
    assert document["model"] == str(weights)
    assert document["encoder"]["image_size"] == [32, 32] and document["encoder"]["depth"] == 1
    assert not list(weights.parent.glob("*.json"))
    assert run(*common)[1].endswith("--output FILE.json keeps the numbers)\n")
    options = ["--image-size", "48x40", "--mean", "0.5", "--std", "0.4,0.5,0.6"]
    complained = run(*common, *options)[2]
    assert "resampled: pos_embed 4×4 → 6×5 in each pass (bicubic); assumed: 3 heads" in complained
    assert "images of 48×40 pixels" in complained
    assert "mean 0.5, 0.5, 0.5, std 0.4, 0.5, 0.6" in complained


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = save_checkpoint(tiny_recipe(folder, "mae"))
    export(str(checkpoint), folder / "encoder.safetensors", format="safetensors")
    return folder / "encoder.safetensors"


def test_an_export_is_measured_as_the_run_it_is_from(
    exported: Path, image_folder: Callable[..., Path]
) -> None:
    data, models = image_folder(num_images=6), (exported, exported.with_name("tiny"))
    figures = [pospre.measure("knn", str(path), data, {"k": 2}) for path in models]
    assert figures[0]["top1"] == figures[1]["top1"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timm_kwargs", "[" * 100_000),
        ("timm_kwargs", '{"img_size": "64"}'),
        ("timm_kwargs", None),
        ("mean", "[NaN, 0, 0]"),
        ("std", '{"a": 1}'),
        ("std", None),
    ],
)
def test_a_header_that_no_export_writes_is_one_message(
    key: str, value: str | None, exported: Path, tmp_path: Path
) -> None:
    with safe_open(exported, "pt") as file:
        header = {**file.metadata(), key: value}
    kept = {name: text for name, text in header.items() if text is not None}
    spoiled = tmp_path / "encoder.safetensors"
    save_file(load_file(exported), spoiled, metadata=kept)
    with pytest.raises(UserError, match=f"'{key}' in its header is not what pospre.export writes"):
        open_model(str(spoiled))


def test_a_name_of_timm_has_random_weights_of_a_seed_and_says_so(
    run: Run, tiny_timm: str, image_folder: Callable[..., Path]
) -> None:
    address = f"timm:{tiny_timm}"
    code, _, complained = run("knn", "--model", address, "--data", image_folder(), "k=2")
    assert code == 0 and "RANDOM WEIGHTS of seed 0" in complained
    assert "images of 224×224 pixels, mean 0.5, 0.5, 0.5" in complained
    first, again, other = (open_model(address, seed=seed).model for seed in (0, 0, 1))
    key = "blocks.0.attn.qkv.weight"
    weight = first.encoder.get_parameter(key)
    assert torch.equal(weight, again.encoder.get_parameter(key))
    assert not torch.equal(weight, other.encoder.get_parameter(key))


def test_a_name_of_timm_takes_the_weights_of_a_file(tiny_timm: str, weights: Path) -> None:
    subject = open_model(f"timm:{tiny_timm},{weights}", shown=Shown((64, 64)))
    for shown in ("has 8×8: its kernel is resized", "mean 0.5, 0.5, 0.5"):
        assert shown in subject.origin
    for address, message in (
        (f"timm:{tiny_timm},weights.txt", "after the comma, give a file that ends in .safetensors"),
        (f"timm:{tiny_timm},{weights.parent}/none.pth", "--model .*none.pth does not exist"),
        ("timm:vit_tinny_patch16_224,x.pth", "no model 'vit_tinny_patch16_224'. Did you mean"),
        ("timm:resnet18", "not a plain Vision Transformer"),
    ):
        with pytest.raises(UserError, match=message):
            open_model(address)


def test_what_cannot_be_measured_is_refused_in_a_line(
    run: Run,
    weights: Path,
    image_folder: Callable[..., Path],
    mae_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any image is encoded."""
    monkeypatch.setattr("pospre.nn.vit.Encoder.forward", None)
    data, flat = image_folder(), image_folder(classes=(), name="flat")
    for message, where in (("knn: it needs labels", flat), ("does not exist", flat / "none")):
        code, _, complained = run("knn", "--model", weights, "--data", where, "k=2")
        assert code == 2 and message in complained
    refused: dict[str, list[Any]] = {
        "weights without a run's heads": ["--model", weights],
        "give a side in pixels, or HxW": ["--model", weights, "--image-size", "big"],
        "is measured with the values of its recipe": [
            "--model",
            mae_checkpoint,
            "--image-size",
            "64",
        ],
        "--std is '0'; give numbers in [0, 1]": ["--model", weights, "--std", "0"],
        "timm:resnet50,FILE with its weights in a file": ["--model", "resnet50"],
        "save its weights to a file first": ["--model", "facebook/dinov2-small"],
        "--mean is 'grey'": ["--model", weights, "--mean", "grey"],
        "--mean has 2 numbers; give one, or 3": ["--model", weights, "--mean", "0.5,0.4"],
    }
    for message, arguments in refused.items():
        code, said, complained = run("position_grid", *arguments, "--data", data)
        assert code == 2 and not said and message in complained
        assert "Traceback" not in complained


def test_the_model_of_a_run_is_loaded(mae_checkpoint: Path) -> None:
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    batch = pospre.from_images(images, index=torch.arange(4), epoch=0)
    model = pospre.load_run(mae_checkpoint.parents[1])  # the run's folder
    other = open_model(str(mae_checkpoint)).model
    assert not model.training and [type(each) for each in model.algorithms] == [pospre.MAE]
    found, expected = (each.state_dict() for each in (model, other))
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert model(batch, progress=1.0).loss.item() == other(batch, progress=1.0).loss.item()
    for address, options, said in (
        ("runs/nothing", {}, "checkpoint runs/nothing does not exist"),
        ("w.safetensors", {}, r"is a weight file: .* pospre.load_weights\("),
        (mae_checkpoint, {"weights": "teacher"}, "trained without a teacher"),
        (mae_checkpoint, {"weights": "both"}, "'student' or 'teacher'"),
    ):
        with pytest.raises(UserError, match=said):
            pospre.load_run(address, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("encoder.channels", 1 << 16, r"tensor 'encoder\.patch.*' has shape .*65536"),
        ("encoder.num_registers", 1 << 16, r"lacks the tensor 'encoder\.reg"),
        ("algorithms.mae.decoder_dim", 1 << 28, r"tensor '.*mae.*' has shape"),
        ("encoder.channels", 10**9, r"'encoder\.channels' is 1000000000"),
        ("algorithms.mae.decoder_depth", 10**9, r"'algorithms\.mae\.decoder_depth' is 1000000000"),
        ("encoder.image_size", 1 << 16, r"has 16777216 patches of 16 x 16 pixels; use at most"),
    ],
)
def test_a_recorded_recipe_larger_than_its_tensors_takes_no_memory(
    mae_checkpoint: Path, key: str, value: int, said: str
) -> None:
    checkpoint = open_checkpoint(str(mae_checkpoint))
    section = recorded(checkpoint.content).recipe
    *parents, last = key.split(".")
    for parent in parents:
        section = section[parent]
    section[last] = value
    if last == "image_size":
        recorded(checkpoint.content).recipe["data"]["views"]["view"]["size"] = value
    refuses(said, lambda: model_of(checkpoint))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"blocks.300.norm1.weight": (192,)}, r"tensors of 1 blocks, but no 'blocks\.0\.attn\.qkv"),
        ({"blocks.x.norm1.weight": (192,)}, r"tensors of 1 blocks, but no 'blocks\.0"),
        (
            {f"blocks.{n}.attn.qkv.weight": (1, 1) for n in range(300)},
            r"has shape \(1, 1\), but an",
        ),
        ({"patch_embed.proj.weight": (192, 768)}, r"patch embedding has 2 dimensions"),
    ],
)
def test_a_file_of_fewer_tensors_than_blocks_is_refused_before_any_is_built(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], said: str
) -> None:
    shapes = {"patch_embed.proj.weight": (192, 3, 16, 16), "pos_embed": (1, 4, 192), **tensors}
    path = tmp_path / "weights.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    refuses(said, lambda: open_model(str(path)))


def test_the_start_beside_a_model_of_grey_images_adds_its_colours_up(tmp_path: Path) -> None:
    path = tmp_path / "rgb.pth"
    torch.save(build_encoder("vit_tiny16", image_size=64, depth=2).timm_state(), path)
    start = open_beside(str(path), tiny_recipe(tmp_path, "mae", channels=1)).model
    assert start.encoder.channels == 1 and start.augment.mean.item() == 0
    refuses(
        "takes 3 channels, and the model has 4",
        lambda: open_beside(str(path), tiny_recipe(tmp_path, "mae", channels=4)),
    )


def test_models_made_in_code(image_folder: Callable[..., Path]) -> None:
    data = image_folder(num_images=6)
    vit: Any = timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY).train()
    before = {key: value.clone() for key, value in vit.state_dict().items()}
    found = pospre.measure("knn", vit, data, {"k": 2})
    assert vit.training and all(torch.equal(vit.state_dict()[k], v) for k, v in before.items())
    model = pospre.PretrainModel(pospre.wrap_encoder(vit), seed=0, mean=[0.5] * 3, std=[0.5] * 3)
    assert pospre.measure("knn", model, data, {"k": 2}) == found and model.training
    mae = pospre.MAE(decoder_dim=32, decoder_depth=1, decoder_heads=2)
    model = pospre.PretrainModel(model.encoder, [mae], mean=[0.5] * 3, std=[0.5] * 3)
    assert pospre.measure("knn", model, data, {"k": 2}) == found
    with pytest.raises(UserError, match="these are weights without a run's heads"):
        pospre.measure("position_grid", model, data)
    with pytest.raises(UserError, match="not a plain Vision Transformer"):
        pospre.measure("knn", torch.nn.Linear(2, 2), data)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "swin_tiny", "image_size": 64, "window": 2, **SWIN_NEEDS},
        {"name": "vit_tiny16", "image_size": 64, "depth": 2, "positions": "relative"},
        {"name": "timm:vit_tiny_patch16_224", "image_size": 32, "depth": 1, "drop_path": 0.1},
    ],
)
def test_the_recipe_of_a_model_made_in_code_builds_its_encoder(options: dict[str, Any]) -> None:
    encoder = build_encoder(**options)
    again = blank_encoder(subject_of(PretrainModel(encoder, seed=0)).recipe)
    assert again.options == encoder.options and again.timm_kwargs == encoder.timm_kwargs
