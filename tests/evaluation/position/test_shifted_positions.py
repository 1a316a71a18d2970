"""Positions shifted and stretched are torch's own rolled and resampled tables."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier

from pospre.errors import UserError
from pospre.evaluation.position.shifted_positions import (
    _figures,
    _of_others,
    edits_of,
    table,
)
from pospre.evaluation.registry import figures_of
from pospre.evaluation.run import check_evaluation, run_evaluation
from pospre.nn.interpolation import interpolation_weights
from pospre.training.build import build_model
from tests.evaluation.checkpoints import tiny_recipe

POSITIONS = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
GRID = (3, 4)


def test_shifted_and_stretched_positions_are_those_of_the_place_before_and_of_grid_sample() -> None:
    edits = edits_of(GRID, shifts=(1,), zooms=(2.0,))
    shifted = edits["shifted by 1"](POSITIONS).unflatten(1, GRID)
    own = POSITIONS.unflatten(1, GRID)
    assert torch.equal(shifted[:, 1, 1], own[:, 0, 0])
    assert torch.equal(shifted[:, 0, 0], own[:, 2, 3])
    down, across = (
        interpolation_weights(((torch.arange(side) + 0.5) / side / 2 + 0.25)[None], side, "bicubic")
        for side in GRID
    )
    wanted = torch.einsum("rh,cw,bhwd->brcd", down[0], across[0], own)
    found = edits["the middle, x 2"](POSITIONS).unflatten(1, GRID)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_nearest_neighbour_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    usual = F.normalize(torch.randn(30, 6, generator=generator))
    disturbed = F.normalize(usual + 0.3 * torch.randn(30, 6, generator=generator))
    labels = torch.arange(30) % 3
    found = _figures(disturbed, usual, labels, k=1)
    right = 0
    for row in range(30):
        others = [other for other in range(30) if other != row]
        nearest = KNeighborsClassifier(1).fit(usual[others].numpy(), labels[others].numpy())
        right += int(nearest.predict(disturbed[row : row + 1].numpy())[0] == int(labels[row]))
    assert found["top1"] == pytest.approx(right / 30)
    assert found["cosine"] == pytest.approx(float((disturbed * usual).sum(1).mean()), abs=1e-6)
    assert _figures(disturbed, usual, labels, k=30)["top1"] is None


def test_beside_cosines_stands_that_of_two_images() -> None:
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(40, 6, generator=generator) + 1 for _ in range(300)]
    found = [_of_others(draw) for draw in draws]
    cosines = F.cosine_similarity(draws[0][:, None], draws[0][None], dim=-1)
    assert found[0]["cosine"] == pytest.approx(float((cosines.sum() - 40) / 1560), abs=1e-6)
    assert found[0]["top1"] is None
    spread = torch.tensor([each["cosine"] for each in found]).std()
    error = torch.tensor([each["cosine_se"] for each in found]).mean()
    assert float(error) == pytest.approx(float(spread), rel=0.15)


def test_disturbances_of_a_model(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "mae", image_size=32, patch_size=8)
    data = image_folder(num_images=9)
    settings = {"k": 2, "shifts": "4,1", "zooms": "2", "scales": "1,0.5"}
    document = run_evaluation(
        "shifted_positions", build_model(recipe), recipe, data, settings, progress=False
    )
    results = document["results"]
    rows = {row["what"]: row for row in results["rows"] if row["model"] == "trained"}
    assert list(rows) == [
        "as usual", "shifted by 4", "shifted by 1", "the middle, x 2", "no positions",
        "image at 4 x 4 patches", "image at 2 x 2 patches", "another image",
    ]  # fmt: skip
    # a shift by the whole grid, and the image at its own size, change nothing
    for what in ("as usual", "shifted by 4", "image at 4 x 4 patches"):
        assert rows[what]["cosine"] == pytest.approx(1, abs=1e-5)
        assert rows[what]["top1"] == rows["as usual"]["top1"]
    for what in ("shifted by 1", "the middle, x 2", "no positions", "image at 2 x 2 patches"):
        assert rows[what]["cosine"] < 0.9999
    disturbed = [rows[what]["cosine"] for what in list(rows)[1:-1]]
    assert results["cosine"] == pytest.approx(sum(disturbed) / len(disturbed))
    assert set(figures_of("shifted_positions")) <= set(results)
    assert "untrained: shifted by 1" in table(results)


def test_nothing_to_disturb_is_said(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    data = image_folder(num_images=3)
    for encoder, settings, wanted in (
        ({"positions": "relative"}, {}, "encoder.positions = relative adds none"),
        ({"positions": "none"}, {"scales": []}, "nothing to disturb"),
        ({"class_token": False}, {"features": "cls"}, "no class token"),
        ({}, {"shifts": "9"}, "shifts=9 goes round the grid"),
        ({}, {}, "k=20, but only 2 images can vote; use k=2"),
    ):
        recipe = tiny_recipe(tmp_path, "supervised", **encoder)
        with pytest.raises(UserError, match=wanted):
            check_evaluation("shifted_positions", recipe, data, settings, None)
