"""The position probe as a whole: what is planted is found, mistakes are said before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.errors import UserError
from pospre.evaluation.registry import check_settings
from pospre.evaluation.run import check_evaluation
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.conftest import draw_image
from tests.evaluation.checkpoints import results_of, save_checkpoint, tiny_recipe

SETTINGS: dict[str, Any] = {"num_samples": 56, "layers": [0, 2], "iterations": 15}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_recipe(tmp_path_factory.mktemp("runs"), "mae", image_size=32, patch_size=8)


@pytest.fixture(scope="module")
def versus(recipe: Recipe) -> Path:
    return save_checkpoint(recipe)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(60):
        draw_image(number, 36, 36).save(folder / f"{number:02d}.jpg")
    return folder


@pytest.fixture
def probe(recipe: Recipe, images: Path) -> Callable[..., dict[str, Any]]:
    return lambda output=None, **settings: results_of(
        "position_probe", recipe, images, output, **{**SETTINGS, **settings}
    )


def test_positions_are_found_and_leaving_them_out_is_seen(
    probe: Callable[..., dict[str, Any]], versus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "probe.json"
    results = probe(output, versus=str(versus), grids=["2x3"])
    rows = {
        (tuple(row["grid"]), row["model"], row["shown_as"], row["layer"]): row
        for row in results["rows"]
    }
    assert len(rows) == len(results["rows"]) == 2 * (5 + 5 + 3) * 2
    embedding = rows[(4, 4), "trained", "image", 0]
    assert embedding["top1"] > 0.95 and embedding["r2"] > 0.8
    # every patch carries its sin-cos vector: one colour makes it no harder, shuffling neither
    assert rows[(4, 4), "trained", "constant", 0]["top1"] > 0.95
    assert rows[(4, 4), "trained", "shuffled", 0]["top1"] > 0.9
    assert rows[(4, 4), "trained", "shuffled", 0]["origin_top1"] < 0.3
    assert rows[(4, 4), "trained", "content", 0]["top1"] < 0.6
    assert rows[(4, 4), "untrained", "image", 2] == {
        **rows[(4, 4), "trained", "image", 2], "model": "untrained",
    }  # fmt: skip
    assert results["images_learned"] == 42 and results["images_measured"] == 14
    assert results["masked_top1"] == rows[(4, 4), "trained", "masked", 2]["top1"]
    assert results["r2_se"] == rows[(4, 4), "trained", "image", 2]["r2_se"] > 0
    assert results["chance"] == 1 / 16
    assert (tmp_path / "probe" / results["pictures"][0]).stat().st_size > 10_000
    assert json.loads(output.read_text())["results"] == results
    content = rows[(4, 4), "trained", "content", 2]
    assert content["learned_top1"] > 2 * content["top1"] and content["learned_r2"] > content["r2"]


def test_the_same_twice_and_layers_in_parts_change_nothing(
    probe: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"baseline": False, "iterations": 100, "num_samples": 24}
    once = probe(**few)
    monkeypatch.setattr("pospre.evaluation.position.position_probe.MEMORY", 1)
    again = probe(**few, layers="2,0", batch_size=5)
    for row, other in zip(once["rows"], sorted_like(again, once), strict=True):
        assert row["top1"] == other["top1"]
        assert row["r2"] == pytest.approx(other["r2"], abs=1e-3)


def sorted_like(results: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    order = [(row["shown_as"], row["layer"]) for row in other["rows"]]
    return sorted(results["rows"], key=lambda row: order.index((row["shown_as"], row["layer"])))


def test_an_encoder_that_knows_no_places_has_none_to_forget(images: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "mae", image_size=32, patch_size=8, positions="none")
    settings = {**SETTINGS, "layers": [2], "baseline": False}
    found = results_of("position_probe", recipe, images, **settings)
    assert {row["shown_as"] for row in found["rows"]} == {"image", "shuffled"}
    assert found["content_top1"] is None


def test_a_grid_that_positions_do_not_know_is_said(
    images: Path, recipe: Recipe, tmp_path: Path
) -> None:
    classes = {"supervised": {"num_classes": 2}}
    small = {"image_size": 32, "patch_size": 8, "positions": "relative"}
    other = tiny_recipe(tmp_path, classes, **small)
    said = r"encoder.positions = relative supports only images of 32 × 32 pixels \(4 × 4 patches\)"
    with pytest.raises(UserError, match=f"grids=7x7, but {said}"):
        check_evaluation("position_probe", other, images, {"grids": "7"}, None)
    settings = {"grids": "2x3", "versus": str(save_checkpoint(other))}
    with pytest.raises(UserError, match=f"grids=2x3, versus=.*, but {said}"):
        check_evaluation("position_probe", recipe, images, settings, None)
    assert check_evaluation("position_probe", other, images, {"grids": "4"}, None)


def test_settings_as_written_on_a_command_line() -> None:
    read = check_settings("position_probe", {"layers": "0,2", "grids": "7,2x3"}).values()
    assert read["layers"] == (0, 2) and read["grids"] == ((7, 7), (2, 3))
    assert check_settings("position_probe", {}).values()["layers"] == "all"


def test_mistakes_are_said_before_any_work(
    recipe: Recipe, image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    data = image_folder(num_images=9)

    def message(recipe: Recipe, data: Path = data, **settings: Any) -> str:
        with pytest.raises(UserError) as error:
            check_evaluation("position_probe", recipe, data, settings, None)
        return str(error.value)

    few = image_folder(num_images=5, name="few")
    assert "8 images or more, but only 5 of" in message(recipe, few)
    other = save_checkpoint(tiny_recipe(tmp_path / "other", "mae", image_size=32, patch_size=16))
    assert "patch_size = (16, 16), but the measured one has (8, 8)" in message(
        recipe, versus=str(other)
    )


def test_positions_of_a_field_are_left_out_too(images: Path, tmp_path: Path) -> None:
    small = {"image_size": 32, "patch_size": 8, "positions": "learned"}
    recipe = tiny_recipe(tmp_path, "mae", {"crop_field": {"field_size": 7}}, **small)
    model = build_model(recipe)
    torch.nn.init.normal_(model.encoder.get_parameter("positions.pos_embed"), std=3.0)
    settings = {**SETTINGS, "layers": [0], "baseline": False}
    found = results_of("position_probe", recipe, images, model=model, **settings)
    assert found["top1"] > 0.95 > 0.6 > found["content_top1"]
