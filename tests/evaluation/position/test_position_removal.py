"""Planes of position: found where they are planted, gone afterwards, and nothing else with them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from pospre.errors import UserError
from pospre.evaluation.position.position_removal import without_basis
from pospre.evaluation.position.probes import coordinates_of
from pospre.evaluation.position.subspaces import (
    Removed,
    angles_between,
    blank_directions,
    covariance_plane,
    fewest,
    principal_directions,
    random_directions,
    regression_planes,
    variance_in,
)
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
    left = Removed(basis, tokens.mean(0))(tokens)
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
        left = Removed(plane, tokens.mean(0))(tokens)
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
        left = Removed(basis, tokens.mean(0))(tokens)
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
    given: dict[str, Any] = {"logistic": {"bank": str(data)}, "correspondence": {"num_samples": 6}}
    found = measure(planes=2, evaluations=given)
    assert [step["planes"] for step in found["steps"]] == [0, 1, 2]
    assert found["steps"][0]["variance_removed"] == pytest.approx(0, abs=1e-6)
    assert 0 < found["steps"][1]["variance_removed"] < found["steps"][2]["variance_removed"] < 1
    assert found["r2_left"] == found["steps"][2]["r2"]
    beside = {(row["evaluation"], row["beside"]): row for row in found["evaluations"]}
    for name, figure in (("logistic", "top1"), ("correspondence", "pck")):
        alone = results_of(name, recipe, data, baseline=False, **given[name])
        before, random = beside[name, "before"], beside[name, "random"]
        assert before["value"] == alone[figure] and before["after"] == random["after"]
        assert random["difference"] == pytest.approx(random["after"] - random["value"])
        assert random["low"] <= random["difference"] <= random["high"]
    assert [row["subspace"] for row in found["controls"]] == ["random", "pca"]
    assert found["controls"][1]["variance_removed"] > found["steps"][2]["variance_removed"]
    other = measure(by="covariance")
    assert len(other["steps"]) == 2 and other["r2_left"] < 0.2 < 0.8 < found["steps"][0]["r2"]


def test_the_other_model_lacks_the_planes_and_this_one_keeps_them(recipe: Any) -> None:
    model = build_model(recipe).eval()
    images = torch.randn(2, 3, 32, 32)
    before = model.encoder(images)
    basis = torch.linalg.qr(torch.randn(192, 4)).Q
    without = without_basis(model, Removed(basis, torch.zeros(192)))
    assert torch.equal(model.encoder(images), before)
    assert next(without.parameters()) is next(model.parameters())  # no second time in memory
    assert (without.encoder(images) @ basis).abs().max() < 1e-4
    torch.testing.assert_close(without.encoder(images), before - before @ basis @ basis.T)


def test_golden_directions_of_a_blank_image() -> None:
    tokens = (5.0 * torch.arange(12) % 7).view(4, 3)
    directions, values = blank_directions(tokens)
    assert values.tolist() == pytest.approx([0.924145, 0.118451, 0.003217], abs=1e-6)
    torch.testing.assert_close(directions.T @ directions, torch.eye(3))
    first = directions[:, :1]
    unit = torch.tensor([1.0, 2, 2]) / 3
    left = unit - first @ (first.T @ unit)
    assert left.tolist() == pytest.approx([0.393345, 0.529597, 0.733455], abs=1e-6)
    removed = Removed(first, None)
    once = removed(torch.tensor([5.0, 10, 10]))  # of any length
    assert once.tolist() == pytest.approx([0.398735, 0.536853, 0.743504], abs=1e-6)
    torch.testing.assert_close(removed(once), once)  # idempotent
    assert blank_directions(tokens[:2])[0].shape == (3, 1)  # two centred tokens span a line


def test_content_that_is_orthogonal_to_position_is_left() -> None:
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q
    position = torch.randn(30, 2, generator=generator) @ axes[:, :2].T
    content = torch.randn(30, 6, generator=generator) @ axes[:, 4:10].T
    position = torch.nn.functional.normalize(position, dim=1)  # of one length, as tokens are
    directions, _ = blank_directions(position + 2 * axes[:, 3])
    assert angles_between(axes[:, :2], directions).max() < 1e-3
    left = Removed(axes[:, :2], None)(position + content)
    torch.testing.assert_close(left, torch.nn.functional.normalize(content, dim=1))


def test_controls_have_the_rank_and_nothing_of_position() -> None:
    random = random_directions(40, 5, seed=0)
    torch.testing.assert_close(random.T @ random, torch.eye(5))
    assert torch.equal(random, random_directions(40, 5, seed=0))
    assert angles_between(random, random_directions(40, 5, seed=1)).min() > 20
    tokens = torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [9.0, 1, 3, 1]
    )
    axes = principal_directions(tokens, 2)
    assert axes[0, 0].abs() > 0.99 and axes[2, 1].abs() > 0.99
    assert variance_in(tokens, axes) == pytest.approx(90 / 92, abs=0.01)
    assert [fewest(9, least.__le__) for least in (1, 4, 20)] == [1, 4, 9]


def test_a_blank_image_shows_the_directions(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    data = image_folder(num_images=40, size=(40, 40))
    recipe = tiny_recipe(tmp_path, "mae", positions="sincos")
    few: dict[str, Any] = {"num_samples": 40, "iterations": 10, "by": "blank"}
    measure = partial(results_of, "position_removal", recipe, data, **few)
    given = f"{{correspondence: {{num_samples: 4}}, knn: {{data: {data}, k: 3}}}}"
    found = measure(output=tmp_path / "removal.json", planes=6, evaluations=given)
    assert [step["planes"] for step in found["steps"]] == [0, 1, 2, 5, 6]
    rows = [(row["planes"], row["subspace"]) for row in found["controls"]]
    assert rows == [(count, name) for count in (1, 2, 5, 6) for name in ("random", "pca")]
    last = found["controls"][-2]
    assert last["r2_difference"] == pytest.approx(found["r2_left"] - last["r2"])
    assert last["low"] <= last["r2_difference"] <= last["high"] < 0
    assert {row["evaluation"] for row in found["evaluations"]} == {"correspondence", "knn"}
    assert (tmp_path / "removal" / found["pictures"][0]).is_file()
    assert found["angles_to_mean"] == sorted(found["angles_to_mean"])
    most = measure(blank="mean")  # of untrained tokens, none is enough
    assert most["planes"] == 14 and most["r2_left"] > 0.05 and "angles_to_black" in most


@pytest.mark.parametrize(
    ("encoder", "planes", "said"),
    [
        ({"positions": "torus"}, None, "shows no positions: the largest singular value"),
        ({"positions": "sincos", "depth": 1}, 14, "at most 1. directions may be removed"),
    ],
)
def test_a_blank_image_without_positions_is_refused(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    encoder: dict[str, Any],
    planes: int | None,
    said: str,
) -> None:
    data, recipe = image_folder(num_images=9), tiny_recipe(tmp_path, "mae", **encoder)
    with pytest.raises(UserError, match=f"position_removal: .*{said}"):
        results_of("position_removal", recipe, data, by="blank", planes=planes)
