"""Halves of dense data sets: disjoint, the same for every kind, and compared with a start."""

from pathlib import Path
from typing import Any, Literal

import pytest

from pospre.errors import UserError
from pospre.evaluation.models import Start
from pospre.evaluation.registry import evaluation_module
from pospre.evaluation.run import check_evaluation, run_evaluation
from pospre.evaluation.verdict import power_line, split_figure
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.evaluation.dense.pictures import rendered_splits

HALVES: tuple[Literal["choose", "judge"], ...] = ("choose", "judge")
NAMES = ("depth", "detection", "segmentation", "video_segmentation")


@pytest.fixture(scope="module")
def tracks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return rendered tracks: two to train on, and six of three frames to measure."""
    return rendered_splits(tmp_path_factory.mktemp("tracks"), {"train": 6, "val": 18}, frames=3)


@pytest.mark.parametrize("name", NAMES)
def test_halves_make_up_the_whole(name: str, tracks: Path, dense_recipe: Recipe) -> None:
    data = tracks / "val" if name == "video_segmentation" else tracks
    found: dict[str | None, list[Any]] = {}
    for half in (None, *HALVES):
        opened = check_evaluation(name, dense_recipe, data, {"half": half}, None).opened
        parts = opened if isinstance(opened, list) else opened.val.images
        assert evaluation_module(name).images(opened) == len(parts) > 0
        found[half] = [each.name for each in parts]
    choose, judge = (found[half] for half in HALVES)
    assert sorted(choose + judge) == sorted(found[None])
    if name == "video_segmentation":
        assert choose == [f"scene {number}" for number in (0, 3, 5)]  # never to change


def test_a_start_is_compared_on_a_half(tracks: Path, dense_recipe: Recipe) -> None:
    start = Start(build_model(dense_recipe.model_copy(update={"seed": 3})), "start")
    settings = {"half": "judge", "baseline": False, "iterations": 4}
    found: dict[str, Any] = run_evaluation(
        "depth", build_model(dense_recipe), dense_recipe, tracks, settings, start=start
    )["results"]
    paired = found["rmse_over_start"]
    assert paired["difference"] == pytest.approx(found["rmse"] - found["start_rmse"])
    count = paired["images"]
    assert count == found["images"] and paired["won"] is None
    assert paired["p"] * 2**count % 1 == 0  # of all signs


def test_figures_of_dense_tasks_can_be_judged() -> None:
    for figure in ("depth/rmse", "detection/AP", "video_segmentation/JF"):
        assert "/".join(split_figure(figure)) == figure
    assert "judged on 30 videos" in power_line("video_segmentation/JF", 30)
    with pytest.raises(UserError, match=r"only 3 pairs would judge .* Give more pairs"):
        power_line("correspondence/pck", 3)
