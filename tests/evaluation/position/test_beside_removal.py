"""Encoders with other positions, beside the removal of position from the weights they had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pospre.errors import UserError
from pospre.evaluation.estimates import compared
from pospre.evaluation.models import Start
from pospre.evaluation.position.beside_removal import verdict_on
from pospre.evaluation.results_table import results_table
from pospre.evaluation.run import run_evaluation
from pospre.model.model import PretrainModel
from pospre.training.build import build_model
from tests.evaluation.checkpoints import tiny_recipe

TINY = {"image_size": 32, "patch_size": 8}
PROBED = ("r2", "r2_se", "top1", "top1_se", "cosine", "roll_error")


def beside(
    model: PretrainModel, start: PretrainModel, recipe: Any, data: Path, **given: Any
) -> Any:
    """Return the results for a model beside its start."""
    few, begun = {"num_samples": 32, "iterations": 5, **given}, Start(start.eval(), "w.pth")
    found = run_evaluation(
        "position_removal", model, recipe, data, few, start=begun, progress=False
    )["results"]
    assert f"\nverdict: {found['verdict'][:20]}" in results_table("position_removal", found)
    return found


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Return images of two colours, each with some noise."""
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        name, colour = (("red", 200), ("blue", 60))[number % 2]
        noise = torch.randint(-40, 40, (36, 36, 3), generator=generator)
        pixels = (noise + torch.tensor([colour, 100, 260 - colour])).clamp(0, 255).to(torch.uint8)
        (tmp_path / "colours" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(tmp_path / "colours" / name / f"{number}.png")
    return tmp_path / "colours"


def test_the_verdict_is_on_the_model_beside_the_start_without_position(
    tmp_path: Path, colours: Path
) -> None:
    recipe = tiny_recipe(tmp_path, "mae", **TINY)
    good, same, blind = (build_model(recipe) for _ in range(3))
    torch.nn.init.zeros_(blind.get_parameter("encoder.patch_embed.proj.weight"))
    given = {"by": "covariance", "evaluations": {"knn": {"k": 5}}}
    found = beside(good, blind, recipe, colours, **given)
    assert found["verdict"].startswith("Adapted is better. The adapted encoder's knn/top1 100.0 %")
    assert found["start_r2_left"] == found["steps"][-1]["r2"]
    rows = {row["encoder"]: row for row in found["encoders"]}
    assert [*rows] == ["before", "after", "random", "pca", "adapted"]
    assert found["r2_left"] == rows["adapted"]["r2"] != rows["before"]["r2"]
    assert rows["adapted"]["cosine"] < 0.9 and "w.pth" not in found["verdict"]
    found = beside(blind, good, recipe, colours, **given)
    assert found["verdict"].startswith("Worse than removal from the start. The adapted encoder's")
    assert found["verdict"].endswith("lost). Keep removal.")
    # equal weights have equal figures on equal images
    found = beside(same, good, recipe, colours, **given)
    assert found["verdict"].startswith("Too few images: no difference shown. The adapted encoder's")
    assert "+0.0" in found["verdict"] and found["verdict"].endswith("or more. Keep removal.")
    rows = {row["encoder"]: row for row in found["encoders"]}
    for key in PROBED:
        assert rows["adapted"][key] == rows["before"][key]
    by = {row["beside"]: {**row, "beside": None} for row in found["evaluations"]}
    assert by["adapted"] == by["before"]


def test_only_encoders_without_absolute_places_move_with_the_image(
    tmp_path: Path, image_folder: Callable[..., Path]
) -> None:
    recipes = [tiny_recipe(tmp_path, "mae", positions=each, **TINY) for each in ("sincos", "torus")]
    table, torus = map(build_model, recipes)
    found = beside(torus, table, recipes[1], image_folder(num_images=32), by="blank", planes=2)
    rows = {row["encoder"]: row for row in found["encoders"]}
    assert rows["adapted"]["roll_error"] < 1e-4 < 0.1 < rows["before"]["roll_error"]
    assert rows["before"]["cosine"] == pytest.approx(1) and rows["after"]["cosine"] < 1
    assert (
        found["verdict"].startswith("Nothing here says") and "evaluations=knn" in found["verdict"]
    )


def test_the_blank_image_is_the_starts(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    recipes = [tiny_recipe(tmp_path, "mae", positions=each, **TINY) for each in ("sincos", "none")]
    table, none = map(build_model, recipes)
    images, given = image_folder(num_images=32), {"by": "blank", "planes": 2}
    assert beside(none, table, recipes[1], images, **given)["start_r2_left"] is not None
    with pytest.raises(UserError, match=r"positions = none: a blank image is empty"):
        beside(table, none, recipes[0], images, **given)


def test_tokens_that_do_not_match_are_refused(tmp_path: Path, colours: Path) -> None:
    recipes = [tiny_recipe(tmp_path, "mae", image_size=32, patch_size=size) for size in (8, 16)]
    words = r"--start gives 2×2 tokens of 192 .* --model 4×4 tokens of 192 .* Give as --start"
    with pytest.raises(UserError, match=words):
        beside(build_model(recipes[0]), build_model(recipes[1]), recipes[0], colours)


def results(name: str, won: int, lost: int, images: int = 200) -> dict[str, Any]:
    """Return a figure of the removal and of an adapted encoder that wins and loses images."""
    removed = torch.arange(images) % 2 == 0
    adapted = removed.clone()
    removed[:won], adapted[:won] = False, True
    removed[won : won + lost], adapted[won : won + lost] = True, False
    return compared(name, {"": removed, "adapted_": adapted})


def test_the_first_figure_is_judged_and_the_others_guard_it() -> None:
    better, worse = results("top1", 60, 20), results("top1", 20, 60)
    assert verdict_on({"knn": better, "logistic": results("top1", 9, 12)}).startswith(
        "Adapted is better. The adapted encoder's knn/top1 60.0 % against 40.0 % for removal from "
        "the start on the same 200 images (+20.0, 95 % "
    )
    assert "60 won, 20 lost" in verdict_on({"knn": better})
    guarded = verdict_on({"knn": better, "logistic": worse})
    assert guarded.startswith("Worse than removal") and "logistic/top1" in guarded
    assert "Keep removal." in verdict_on({"knn": results("top1", 31, 30), "logistic": better})
    # of errors, the smaller is better; figures that the data do not have are left out
    depth = {**results("rmse", 20, 60), "delta1": None}
    assert verdict_on({"depth": depth}).startswith("Adapted is better. ")
