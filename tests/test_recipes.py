"""Every recipe that ships is read and built (without memory); the small ones are trained."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pospre.algorithms.dinov2.dinov2 import PrototypeMatching
from pospre.algorithms.dinov2.prototype_task import PrototypeHead
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import load_recipe
from pospre.train import main
from pospre.training.build import build_model
from pospre.training.optimizer.optim import recipe_groups
from tests.drills.certify_demos import small

YAMLS = Path(__file__).parents[1] / "yamls"
RECIPES = sorted(YAMLS.glob("**/*.yaml"))
STEPPED = [path for path in RECIPES if path.parent.name in ("demo", "first_light", "learn")]
PARAMETERS = {
    "vits16": 22e6,
    "vitb16": 86e6,
    "vitl16": 303e6,
    "vith14": 631e6,
    "swin_tiny": 27.5e6,  # 28 with a classifier, as printed
}


def title(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=title)
def test_recipe_builds(path: Path) -> None:
    recipe = load_recipe(path)
    if "supervised" in recipe.algorithms:
        recipe = load_recipe(path, ["algorithms.supervised.num_classes=2"])
    if not recipe.encoder.name:  # its weights say what it is
        patch = 16 if path.stem == "dinov3" else 14
        given = ["algorithms.diet.num_images=8"] if "diet" in recipe.algorithms else []
        recipe = load_recipe(path, ["encoder.name=vits16", f"encoder.patch_size={patch}", *given])
    with torch.device("meta"):
        model = build_model(recipe)
    others = {"crop_field", "stop", "ema_teacher"}  # no loss of their own
    assert {*model.objectives} == {*recipe.algorithms} - others
    groups = recipe_groups(model, recipe.optimizer, peak=1.0)
    assert {group["decayed"] for group in groups} == {True, False}
    size = sum(parameter.numel() for parameter in model.encoder.parameters())
    if recipe.encoder.name in PARAMETERS:
        assert size == pytest.approx(PARAMETERS[recipe.encoder.name], rel=0.04)


@pytest.mark.parametrize("path", STEPPED, ids=title)
def test_small_recipe_trains(path: Path, image_folder: Callable[..., Path], tmp_path: Path) -> None:
    overrides = [
        *small(path, image_folder(num_images=4)),
        f"data.batch_size={4 if path.stem == 'lejepa' else 2}",  # SIGReg takes three or more
        "schedule.warmup=0ba",
        "trainer.max_duration=1ba",
        "trainer.progress_bar=false",
        "evaluation={}",  # whose held-out data are not here
        f"trainer.run_folder={tmp_path}/runs",
    ]
    assert main([str(path), *overrides]) == 0
    assert (tmp_path / "runs" / path.stem / "report.html").exists()
    shows_pictures = load_recipe(path).encoder.channels == 3
    assert (tmp_path / "runs" / path.stem / "views" / "views.json").exists() is shows_pictures


@pytest.mark.parametrize(
    ("name", "layer_decay", "drop_path"),
    [
        ("mae_vits16", 0.75, 0.1),
        ("mae_vitb16", 0.65, 0.1),
        ("mae_vitl16", 0.75, 0.2),
        ("mae_vith14", 0.75, 0.3),
        ("droppos_vitb16", 0.75, 0.1),
        ("lut_vits16", 0.75, 0.1),
        ("lut_vitb16", 0.65, 0.1),
        ("simmim_vitb16", 0.65, 0.1),
        ("lut_simmim_vitb16", 0.65, 0.1),
        ("mp3_vitb16", None, 0.1),
        ("mp3_cifar100_vits4", None, 0.1),
        ("ijepa_vitb16", 0.65, 0.1),
        ("stop_vitl16", 0.75, 0.2),
        ("stop_vitl16_1percent", 0.75, 0.2),
    ],
)
def test_papers_fine_tuning(name: str, layer_decay: float | None, drop_path: float) -> None:
    recipe = load_recipe(YAMLS / "finetune" / f"{name}.yaml")
    assert recipe.optimizer.layer_decay == layer_decay
    assert recipe.encoder.drop_path == drop_path and recipe.encoder.weights


def built(name: str, *overrides: str) -> PretrainModel:
    """Return a recipe's model without memory, its encoder cut to one block."""
    recipe = load_recipe(YAMLS / f"{name}.yaml", ["encoder.depth=1", *overrides])
    with torch.device("meta"):
        return build_model(recipe)


def test_dinov2s_large_model_has_two_bottlenecks() -> None:
    objective = built("pretrain/dinov2_vitl14").objectives["dinov2"]
    assert isinstance(objective, PrototypeMatching) and objective.patch_head is not None
    for head, width in ((objective.head, 384), (objective.patch_head, 256)):
        assert isinstance(head, PrototypeHead)
        assert head.last.weight.shape == (131072, width)


def test_simmim_is_cut_out_bilinearly_and_jepas_large_images_show_more() -> None:
    simmim = load_recipe(YAMLS / "pretrain" / "simmim_vitb16.yaml")
    assert simmim.data.views["view"].interpolation == "bilinear"
    ijepa = load_recipe(YAMLS / "pretrain" / "ijepa_vith16.yaml")
    assert ijepa.algorithms["ijepa"]["context_tokens"] == 270


@pytest.mark.parametrize(
    ("variant", "size"),
    [("learned_pos", "vitl16"), ("l1", "vith14"), ("lowres_bilinear", "vith16")],
)
def test_stops_ablations_are_one_override(variant: str, size: str) -> None:
    model = built(f"pretrain/stop_{size}", f"algorithms.stop.variant={variant}")
    assert "ijepa" in model.objectives


def test_an_ablation_of_stop_trains(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    small = [
        *("encoder.name=vit_tiny16", "encoder.depth=1", "encoder.image_size=64"),
        *("encoder.patch_size=8", "algorithms.ijepa.predictor_depth=1"),
        *("algorithms.ijepa.predictor_heads=4", f"data.path={image_folder(num_images=8)}"),
        *("data.batch_size=4", "schedule.warmup=1ba", "trainer.max_duration=2ba"),
        *("trainer.device=cpu", "trainer.precision=fp32", "trainer.progress_bar=false"),
        *("algorithms.stop.variant=lowres_maxpool", f"trainer.run_folder={tmp_path}/runs"),
    ]
    assert main([str(YAMLS / "pretrain" / "stop_vitb16.yaml"), *small]) == 0
    losses = (tmp_path / "runs" / "stop_vitb16" / "metrics.jsonl").read_text()
    assert "loss/ijepa" in losses and "noise_std" not in losses


def test_demo_classifier_starts_from_a_pretrained_encoder(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    common = [
        f"data.path={image_folder(num_images=16)}",
        "data.batch_size=8",
        "schedule.warmup=1ba",
        "trainer.max_duration=2ba",
        "trainer.device=cpu",
        "trainer.progress_bar=false",
        f"trainer.run_folder={tmp_path}/runs",
    ]
    own = [f"evaluation.accuracy.data={tmp_path}/images", f"encoder.weights={tmp_path}/runs/mae"]
    assert main([str(YAMLS / "demo" / "mae.yaml"), *common]) == 0
    assert main([str(YAMLS / "demo" / "supervised.yaml"), *common, *own]) == 0
    assert (tmp_path / "runs" / "supervised" / "evaluation" / "accuracy.json").exists()
