"""Logistic regression: its optimum, what it separates, and its bad input."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from pospre.evaluation import features
from pospre.evaluation.classification import logistic
from pospre.training.build import load_model
from tests.evaluation.checkpoints import measured

evaluate = partial(measured, "logistic")


def test_probabilities_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = torch.randn(80, 5, generator=generator)
    labels = torch.randint(0, 3, (80,), generator=generator)
    found = (bank @ logistic.logistic(bank, labels, 3, 0.01, 200)).softmax(1)
    theirs = LogisticRegression(C=1 / (80 * 0.01), fit_intercept=False, tol=1e-9, max_iter=5000)
    wanted = torch.from_numpy(theirs.fit(bank, labels).predict_proba(bank)).float()
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


def test_standardised_features_have_the_banks_statistics_and_a_bias() -> None:
    bank, queries = torch.randn(50, 4) * 3 + 7, torch.full((2, 4), 7.0)
    scaled, others = logistic.standardise(bank, queries)
    torch.testing.assert_close(scaled[:, :4].mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled[:, :4].std(0), torch.ones(4))
    assert torch.equal(scaled[:, 4], torch.ones(50)) and float(others[:, :4].abs().max()) < 1


def test_stops_protocol_standardises_measured_images_by_themselves_without_a_bias() -> None:
    bank, queries = torch.randn(50, 4) * 3 + 7, torch.randn(30, 4) - 5
    for part, found in zip((bank, queries), logistic.standardise_apart(bank, queries), strict=True):
        torch.testing.assert_close(found.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(found.std(0), torch.ones(4))
        assert found.shape == part.shape


@pytest.mark.parametrize("size", [(192, 128), (128, 192), (64, 64)])
def test_stops_protocol_sees_the_middle_with_all_of_the_short_side(
    size: tuple[int, int], mae_checkpoint: Path, image_folder: Any, monkeypatch: Any
) -> None:
    data = image_folder(num_images=12, size=size)
    seen: list[torch.Tensor] = []
    encode = features._tokens

    def watched(model: Any, images: torch.Tensor, parts: Any) -> Any:
        seen.append(images)
        return encode(model, images, parts)

    monkeypatch.setattr(features, "_tokens", watched)
    results = evaluate(mae_checkpoint, data, bank=str(data), protocol="stop", baseline=False)
    assert results["top1_weight_decay"] == 0.0025 / 12
    model, _ = load_model(str(mae_checkpoint))
    with Image.open(sorted(data.rglob("*.jpg"))[0]) as image:  # as torchvision's transforms do
        middle = CenterCrop(64)(Resize(64, InterpolationMode.BILINEAR, antialias=True)(image))
    wanted = model.augment.normalise(torch.tensor(np.array(middle)).permute(2, 0, 1)[None].float())
    assert float((seen[0][:1] - wanted).abs().max()) < 0.1  # two levels of 255


def test_results_state_what_was_measured(mae_checkpoint: Path, image_folder: Any) -> None:
    data = image_folder(num_images=12)
    results = evaluate(mae_checkpoint, data, bank=str(data), iterations=20)
    assert (results["bank_samples"], results["query_samples"], results["classes"]) == (12, 12, 2)
    assert results["chance"] == 0.5 and 0 <= results["initial_top1"] <= 1
    gain = results["top1_difference"]
    assert gain == pytest.approx(results["top1"] - results["initial_top1"])
    assert results["top1"] == 1.0  # fitted to the very images it is measured on
    assert evaluate(mae_checkpoint, data, bank=str(data), num_bank=10)["bank_samples"] == 10
