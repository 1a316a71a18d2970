"""Stochastic positions: what the predictor adds in training, and plain cosines."""

from typing import Any

import numpy as np
import pytest
import scipy.spatial.distance
import torch

from pospre.algorithms.stop.stop import Noisy, StochasticPredictor
from pospre.evaluation.analysis.stop_similarity import noise, similarity
from pospre.training.build import build_model
from tests.evaluation.analysis.small import IJEPA, Analyse, small_recipe


def objective_of(**stop: Any) -> Noisy:
    model = build_model(small_recipe({"ijepa": IJEPA, "stop": stop}))
    objective = model.objectives["ijepa"]
    assert isinstance(objective, Noisy)
    return objective


@pytest.mark.parametrize("variant", ["masked", "context", "both", "fixed_cov"])
def test_the_noise_has_the_law_of_training(variant: str) -> None:
    """The covariance of what the predictor adds to a token, and of what is drawn here."""
    objective = objective_of(variant=variant, noise_std=0.5)
    predictor = objective.predictor
    assert isinstance(predictor, StochasticPredictor)
    draws, width = 4000, predictor.dim if variant == "fixed_cov" else 32
    key = "stop/context" if variant == "context" else "stop/masked"
    normal = torch.randn(1, draws, width, generator=torch.Generator().manual_seed(0))
    other = torch.zeros(1, 1, 32)
    batch = {
        "stop/context": normal if key == "stop/context" else other,
        "stop/masked": other[:, None] if key == "stop/context" else normal[:, None],
    }
    shown = torch.zeros(1, draws if key == "stop/context" else 1, 32)
    targets = torch.zeros(1, 1, 1 if key == "stop/context" else draws, dtype=torch.int64)
    with torch.no_grad():
        predictor.train().mask_token.zero_()
        context = predictor.context_tokens(shown, batch)
        masked = predictor.masked_tokens(targets, batch)
        added = context - predictor.embed.bias if key == "stop/context" else masked
        found = torch.cat([noise(predictor, 16, 0, draw) for draw in range(draws // 16)])
    expected = np.cov(added.reshape(-1, predictor.dim).numpy(), rowvar=False)
    drawn = np.cov(found.numpy(), rowvar=False)
    assert np.abs(drawn - expected).max() < 0.15 * np.abs(expected).max()
    assert not torch.equal(noise(predictor, 16, 0, 0), noise(predictor, 16, 0, 1))
    assert torch.equal(noise(predictor, 16, 3, 1), noise(predictor, 16, 3, 1))


def test_similarity_is_scipys() -> None:
    queries, places = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = 1 - scipy.spatial.distance.cdist(queries, places, "cosine")
    np.testing.assert_allclose(similarity(queries, places), expected, atol=1e-6)


def test_evaluation_compares_and_draws(analyse: Analyse) -> None:
    recipe = small_recipe({"ijepa": IJEPA, "stop": {"noise_std": 5.0}})
    results = analyse("stop_similarity", recipe, num_draws=8)
    assert results["pictures"] == ["stop_similarity.png"] and results["queries"] == [10, 5, 15]
    assert 0 < results["own"] < 1 and results["own_se"] > 0
    assert 0 < results["nearest"] < 1 and results["distance"] > 0
    still = small_recipe({"ijepa": IJEPA, "stop": {"noise_std": 0.0}})
    found = analyse("stop_similarity", still, num_draws=2, queries=[3], folder=False)
    assert (found["nearest"], found["distance"]) == (1, 0)
    assert found["own"] == pytest.approx(1, abs=1e-6)
