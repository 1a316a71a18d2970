"""Planes of position: found where they are planted, gone afterwards, and nothing else with them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from pospre.evaluation.position.position_removal import (
    PlanesRemoved,
    covariance_plane,
    regression_planes,
    without_planes,
)
from pospre.evaluation.position.probes import coordinates_of
from pospre.training.build import build_model
from tests.evaluation.checkpoints import results_of, tiny_recipe

GRID = (4, 5)


@pytest.fixture(scope="module")
def planted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens (4000, 12), whose first plane is row and column plus noise, places and axes."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 20, (4000,), generator=generator)
    tokens = torch.randn(4000, 12, generator=generator)
    tokens[:, :2] = coordinates_of(places, GRID) + 0.1 * tokens[:, :2]
    axes = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q
    return tokens @ axes.T + 3, places, axes


def found_in(left: torch.Tensor, wanted: np.ndarray) -> float:
    """Return the R² of scikit-learn's ridge regression.

    Least squares would also read, on one kind of processor more than on another, the rounding
    errors that are left where a plane was.
    """
    return float(Ridge(alpha=1.0).fit(left, wanted).score(left, wanted))


def test_the_place_in_a_sequence_is_found_too(
    planted: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    tokens, places, _ = planted
    basis = regression_planes(tokens, places, (20, 1), 3, weight_decay=1e-4)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), atol=1e-5, rtol=0)
    left = PlanesRemoved(tokens.mean(0), basis)(tokens)
    wanted = places.float().unsqueeze(1).numpy()
    assert found_in(tokens, wanted) > 0.9 and found_in(left, wanted) < 0.1


def test_the_planted_plane_is_found_and_no_position_is_left(
    planted: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    tokens, places, axes = planted
    basis = regression_planes(tokens, places, GRID, 3, weight_decay=1e-4)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), atol=1e-5, rtol=0)
    shared = torch.linalg.svdvals(axes[:, :2].T @ basis[:, :2])
    assert shared.min() > 0.999
    wanted = coordinates_of(places, GRID).numpy()
    assert LinearRegression().fit(tokens, wanted).score(tokens, wanted) > 0.98
    for plane in (basis[:, :2], covariance_plane(tokens, places, GRID)):
        left = PlanesRemoved(tokens.mean(0), plane)(tokens)
        assert found_in(left, wanted) < 0.01
        torch.testing.assert_close(left @ axes[:, 2:], tokens @ axes[:, 2:], atol=0.2, rtol=0.05)


def test_many_copies_of_position_go_with_the_covariance_and_not_with_one_plane(
    planted: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    _, places, axes = planted
    generator = torch.Generator().manual_seed(1)
    copies = coordinates_of(places, GRID).repeat(1, 6)
    tokens = (copies + torch.randn(4000, 12, generator=generator)) @ axes.T
    wanted = coordinates_of(places, GRID).numpy()

    def left_by(basis: torch.Tensor) -> float:
        left = PlanesRemoved(tokens.mean(0), basis)(tokens)
        return found_in(left, wanted)

    assert left_by(covariance_plane(tokens, places, GRID)) < 1e-4
    planes = regression_planes(tokens, places, GRID, 2, weight_decay=1e-4)
    assert left_by(planes) <= left_by(planes[:, :2]) < 0.9 * left_by(planes[:, :0])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_recipe(tmp_path_factory.mktemp("runs"), "mae", image_size=32, patch_size=8)


def test_the_evaluation_says_what_is_left_and_what_knn_becomes(
    recipe: Any, image_folder: Callable[..., Path]
) -> None:
    data = image_folder(num_images=60, size=(40, 40))
    few: dict[str, Any] = {"num_samples": 60, "iterations": 10}
    measure = partial(results_of, "position_removal", recipe, data, **few)
    found = measure(planes=2, evaluations=["logistic"], bank=str(data))
    assert [step["planes"] for step in found["steps"]] == [0, 1, 2]
    assert found["steps"][0]["variance_removed"] == pytest.approx(0, abs=1e-6)
    assert 0 < found["steps"][1]["variance_removed"] < found["steps"][2]["variance_removed"] < 1
    assert found["r2_left"] == found["steps"][2]["r2"]
    alone = results_of("logistic", recipe, data, bank=str(data), baseline=False)
    before, after = found["evaluations"]["logistic"]["top1"]
    assert before == alone["top1"] and 0 <= after <= 1
    other = measure(by="covariance")
    assert len(other["steps"]) == 2 and other["r2_left"] < 0.2 < 0.8 < found["steps"][0]["r2"]


def test_the_copy_lacks_the_planes_and_the_model_keeps_them(recipe: Any) -> None:
    model = build_model(recipe).eval()
    images = torch.randn(2, 3, 32, 32)
    before = model.encoder(images)
    basis = torch.linalg.qr(torch.randn(192, 4)).Q
    without = without_planes(model, torch.zeros(192), basis)
    assert torch.equal(model.encoder(images), before)
    assert (without.encoder(images) @ basis).abs().max() < 1e-4
    torch.testing.assert_close(without.encoder(images), before - before @ basis @ basis.T)
