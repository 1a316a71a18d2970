"""Correlation of positions: numpy's Pearson over all pairs of images, by plain loops."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from pospre.evaluation.analysis.position_correlation import (
    correlations,
    estimates,
    mosaic,
    standardise,
    sum_features,
)
from tests.evaluation.analysis.small import Analyse, small_recipe

FEATURES = torch.randn(13, 4, 6, generator=torch.Generator().manual_seed(0))
FEATURES += torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1))  # of the positions


def test_correlations_are_numpys_over_all_pairs_of_images() -> None:
    found = correlations(sum_features([standardise(FEATURES)]))
    pearson = np.corrcoef(FEATURES.flatten(0, 1)).reshape(13, 4, 13, 4).swapaxes(1, 2)
    np.testing.assert_allclose(found[0], pearson[range(13), range(13)].mean(0), atol=1e-6)
    across = np.mean([pearson[m, n] for m, n in itertools.permutations(range(13), 2)], axis=0)
    np.testing.assert_allclose(found[1], across, atol=1e-6)


def test_batches_do_not_change_the_groups() -> None:
    whole = sum_features([standardise(FEATURES)])
    parts = sum_features(standardise(part) for part in FEATURES.split(3))
    assert whole.count_G.tolist() == parts.count_G.tolist() == [2, 2, 2] + 7 * [1]
    torch.testing.assert_close(whole.features_GND, parts.features_GND)
    torch.testing.assert_close(whole.pairs_GNN, parts.pairs_GNN)


def test_the_jackknife_is_that_of_the_images_left_out() -> None:
    few = FEATURES[:7]  # each a group of its own
    found = estimates(sum_features([standardise(few)]))
    left = []
    for image in range(7):
        rest = torch.cat([few[:image], few[image + 1 :]])
        across = correlations(sum_features([standardise(rest)]))[1]
        left.append(float(across.diagonal().mean()))
    expected = np.sqrt(6 / 7 * np.square(np.array(left) - np.mean(left)).sum())
    assert found["same_se"] == pytest.approx(expected)
    assert estimates(sum_features([standardise(few[:2])]))["same_se"] is None


def test_features_of_positions_alone_and_of_images_alone() -> None:
    places = FEATURES[:1].expand(5, -1, -1)
    same = estimates(sum_features([standardise(places)]))
    assert same["same"] == pytest.approx(1) and same["within"] == pytest.approx(same["other"])
    contents = FEATURES[:, :1].expand(-1, 4, -1)
    found = estimates(sum_features([standardise(contents)]))
    assert found["within"] == pytest.approx(1)
    assert found["position"] == pytest.approx(0, abs=1e-12)


def test_the_mosaic_has_each_map_at_its_position() -> None:
    picture = mosaic(torch.arange(36.0).view(6, 6), (2, 3))
    assert picture.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_array_equal(picture[3:5, 4:7], [[24, 25, 26], [27, 28, 29]])
    assert np.isnan(picture[2]).all() and np.isnan(picture[:, 3]).all()


def test_evaluation_draws_and_keeps_the_maps(analyse: Analyse, tmp_path: Path) -> None:
    results = analyse("position_correlation", small_recipe(), batch_size=4)
    assert (results["layer"], results["samples"], results["grid"]) == (2, 6, [4, 4])
    with np.load(tmp_path / "position_correlation" / results["maps"]) as archive:
        across = archive["across"]
        np.testing.assert_allclose(np.diag(archive["within"]), 1, atol=1e-6)
    assert np.diag(across).mean() == pytest.approx(results["same"], abs=1e-6)
    assert results["position"] == pytest.approx(results["same"] - results["other"])
    assert (results["layer"], results["samples"]) == (2, 6)
    start = analyse("position_correlation", small_recipe(), batch_size=6, layer=0, folder=False)
    assert start["layer"] == 0 and start["maps"] is None and start["same"] != results["same"]
