"""Predicted features against those of all patches: plain loops, and a predictor that is right."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pospre.batch import Batch
from pospre.evaluation.analysis.prediction_heatmaps import hide, predicted_similarity
from pospre.training.build import build_model
from tests.algorithms.cases import random_views
from tests.evaluation.analysis.small import IJEPA, Analyse, small_recipe

STOP = {"ijepa": IJEPA, "stop": {}}


def batch_of(count: int) -> Batch:
    return {**random_views(size=count, seed=0), "index": torch.arange(count) + 5}


def test_similarity_is_the_cosine_of_prediction_and_teacher() -> None:
    model = build_model(small_recipe(STOP)).eval()
    batch = hide(model, batch_of(3), seed=1)
    found = predicted_similarity(model, batch)
    images = model.images(batch)
    with torch.no_grad():
        passes = {name: model.run_pass(name, images, batch) for name in ("student", "teacher")}
        outputs = model.objectives["ijepa"](passes, batch)
    predicted = outputs["predicted"].flatten(1, 2)
    for image in range(3):
        for patch in range(16):
            feature = F.layer_norm(passes["teacher"][image, 1 + patch], (32,))
            expected = F.cosine_similarity(predicted[image], feature[None])
            torch.testing.assert_close(found[image, :, patch], expected, rtol=1e-4, atol=1e-5)


def test_masks_are_those_of_the_image_whatever_the_batch() -> None:
    model = build_model(small_recipe(STOP)).eval()
    whole = hide(model, batch_of(4), seed=1)
    part = hide(model, {key: value[2:] for key, value in batch_of(4).items()}, seed=1)
    for key in ("view/visible", "ijepa/targets"):
        assert torch.equal(whole[key][2:], part[key])
    shown, hidden = whole["view/visible"], whole["ijepa/targets"].flatten(1)
    assert not bool((shown[:, :, None] == hidden[:, None]).any())


def test_a_predictor_that_is_right_is_at_its_place(
    analyse: Analyse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pospre.evaluation.analysis.prediction_heatmaps.predicted_similarity",
        lambda _, batch: F.one_hot(batch["ijepa/targets"].flatten(1), 16).float(),
    )
    results = analyse("prediction_heatmaps", small_recipe(STOP), temperature=1e-3, drawn=False)
    assert results["nearest"] == 1 and results["distance"] == pytest.approx(0, abs=1e-6)
    flat = analyse("prediction_heatmaps", small_recipe(STOP), temperature=1e6, drawn=False)
    assert flat["distance"] == pytest.approx(flat["uniform_distance"], rel=1e-4)


@pytest.mark.parametrize(
    "algorithms", [{"ijepa": IJEPA}, {"ijepa": IJEPA, "crop_field": {"field_size": 6}, "stop": {}}]
)
def test_evaluation_measures_and_draws(analyse: Analyse, algorithms: dict[str, Any]) -> None:
    results = analyse("prediction_heatmaps", small_recipe(algorithms), batch_size=4, num_pictures=2)
    assert results["pictures"] == ["prediction_heatmaps.png"] and results["samples"] == 6
    assert 0 <= results["nearest"] <= 1 and results["distance"] > 0
    again = analyse("prediction_heatmaps", small_recipe(algorithms), batch_size=6, drawn=False)
    assert again["distance"] == pytest.approx(results["distance"], rel=1e-5)
