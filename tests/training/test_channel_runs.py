"""Images of one or of many channels, from files to an exported encoder."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from data_prep.convert import main as convert
from pospre.errors import UserError
from pospre.evaluate import main as evaluate
from pospre.evaluation.run import check_evaluation
from pospre.export import main as export
from pospre.nn.build import build_encoder
from pospre.recipe.recipe import load_recipe
from pospre.training.build import load_model
from tests.conftest import draw_image
from tests.data.deep_files import band_folder
from tests.training.tiny_runs import Run, curve

RECIPE = Path(__file__).parents[2] / "yamls" / "demo" / "mae_channels.yaml"


SMALL = (
    "data.batch_size=6",
    "data.num_workers=1",
    "schedule.warmup=1ba",
    "trainer.device=cpu",
    "trainer.log_interval=1",
    "trainer.progress_bar=false",
)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return [
        *SMALL,
        "encoder={name: vit_tiny16, image_size: 32, patch_size: 8, depth: 1, channels: 6}",
        "trainer.max_duration=3ba",
        f"trainer.run_folder={tmp_path}/runs",
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of six bands; the files that they were made of are in ``arrays`` beside."""
    folder = tmp_path_factory.mktemp("bands")
    source, target = band_folder(folder / "arrays"), folder / "shards"
    arguments = ["--format", "mds", "--channels", "6", "--workers", "1"]
    assert convert([str(source), str(target), *arguments]) == 0
    return target


def losses(folder: Path) -> list[float]:
    return [loss for _, loss, _ in curve(folder)]


def test_six_bands_from_conversion_to_export(
    shards: Path, options: list[str], run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, arrays = f"data.path={shards}", shards.with_name("arrays")
    changes = "data.views.view.augment={blur_rate: 0.5, solarize_rate: 0.5, erase_rate: 0.5}"
    code, said = run(RECIPE, path, *options, "run_name=mds", changes)
    assert code == 0, said
    folder = tmp_path / "runs" / "mds"
    noted = load_model(str(folder))[1].data
    assert noted.mean is not None and len(noted.mean) == len(noted.std or ()) == 6
    # the same run from the files themselves, with what the conversion has measured
    code, said = run(
        RECIPE,
        *options,
        changes,
        f"data.path={arrays}",
        "run_name=files",
        f"data.mean={list(noted.mean)}",
        f"data.std={list(noted.std or ())}",
    )
    assert code == 0, said
    assert losses(folder) == losses(tmp_path / "runs" / "files")

    arguments = ["knn", "--model", str(folder), "--data", str(arrays), "k=3"]
    assert evaluate(arguments) == 0
    capfd.readouterr()
    assert export([str(folder), f"{tmp_path}/x.pth", "--format", "timm"]) == 0
    said = capfd.readouterr().out
    line = re.search(r"timm\.create_model\((.*)\)", said)
    assert line is not None and "in_chans=6" in line[1]
    model: Any = eval(f"timm.create_model({line[1]})", {"timm": timm})
    assert model(torch.zeros(1, 6, 32, 32)).shape == (1, 1000)


def test_grey_images_in_one_channel(run: Run, options: list[str], tmp_path: Path) -> None:
    source = tmp_path / "grey"
    source.mkdir()
    for number in range(6):
        draw_image(number, 60, 50).convert("L").save(source / f"{number}.png")
    own = [*options, "encoder.channels=1", f"data.path={source}"]
    code, said = run(RECIPE, *own)
    assert code == 2 and "holds images and notes none for encoder.channels = 1" in said
    assert run(RECIPE, *own, "data.mean=[0.5]", "data.std=[0.25]")[0] == 0
    assert len(losses(tmp_path / "runs" / "mae_channels")) == 3
    # and in three, as ever
    assert run(RECIPE, *own, "encoder.channels=3", "run_name=rgb")[0] == 0


def test_grey_images_continue_weights_of_colours(
    run: Run, options: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "grey"
    source.mkdir()
    for number in range(6):
        draw_image(number, 60, 50).convert("L").save(source / f"{number}.png")
    torch.manual_seed(0)
    small: dict[str, Any] = {"image_size": 32, "patch_size": 8, "depth": 1}
    torch.save(build_encoder("vit_tiny16", **small).timm_state(), tmp_path / "rgb.pth")
    own = [
        *(*options, f"data.path={source}", "data.mean=[0.5]", "data.std=[0.25]"),
        *("encoder={weights: " + f"{tmp_path}/rgb.pth, channels: 1, image_size: 32}}",),
        *("reference={weights: start}", "algorithms={distill: {}}", "schedule.warmup=0ba"),
        "trainer.precision=fp32",
    ]
    code, said = run(RECIPE, *own)
    assert code == 0 and "has 3: its kernels are added up" in said, said
    first, second, _ = losses(tmp_path / "runs" / "mae_channels")
    assert 0 <= first < 1e-9 < second  # the reference is as the start


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["encoder.channels=5"], "encoder.channels = 5, but .* was converted with --channels 6"),
        (["encoder.channels=3"], "encoder.channels = 3, but .* was converted with --channels 6"),
        (["data.mean=[0.5, 0.5]"], "data.mean has 2 numbers; give one, or 6"),
        (["data.views.view.augment={jitter: [0.4, 0.4, 0.2, 0.1]}"],
         "data.views.view.augment.jitter is for red, green and blue"),
        (["data.deep_range=[0, 255]"], "data.deep_range = 0..255, but .* --deep-range auto"),
        (["data.deep_range=[9, 1]"], "data.deep_range"),
        (["data.deep_range=wide"], "data.deep_range"),
        (["encoder={name: swin_tiny, image_size: 64, channels: 6}"],
         "encoder.name = swin_tiny needs encoder.channels: 3, not 6"),
    ],
)  # fmt: skip
def test_what_does_not_work_names_its_key(
    changes: list[str], message: str, shards: Path, options: list[str], run: Run
) -> None:
    code, said = run(RECIPE, f"data.path={shards}", *options, *changes)
    assert code == 2 and re.search(message, said), said


@pytest.mark.parametrize("name", ["simmim", "dinov2", "lut"])
def test_other_methods_take_any_number_of_channels(
    name: str, shards: Path, run: Run, tmp_path: Path
) -> None:
    """What they predict, their crops and their second view; others look at the encoder alone."""
    recipe = RECIPE.parent / f"{name}.yaml"
    small = [*SMALL, f"data.path={shards}", "encoder.channels=6", "encoder.depth=1"]
    small += ["trainer.max_duration=2ba", "evaluation={}", f"trainer.run_folder={tmp_path}/runs"]
    views = load_recipe(recipe).data.views
    plain = [f"data.views.{group}.augment={{blur_rate: 0.5}}" for group in views]
    code, said = run(recipe, *small, *plain)
    assert code == 0, said


def test_pictures_of_other_channels_are_refused(shards: Path, tmp_path: Path) -> None:
    changes = [f"data.path={shards}", "encoder.channels=6", "encoder.depth=1"]
    recipe = load_recipe(RECIPE.parent / "droppos.yaml", changes)
    with pytest.raises(UserError, match=r"position_pictures: .* encoder\.channels = 6"):
        check_evaluation("position_pictures", recipe, shards, {}, tmp_path / "pictures.json")
