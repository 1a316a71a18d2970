"""Spectra and ranks as numpy and scipy have them; lengths and artefacts of made-up tokens."""

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from pospre.evaluation.analysis.spectrum import Gathered, rank_of, summarise, token_lengths
from tests.evaluation.analysis.small import Analyse, small_recipe


@pytest.mark.parametrize("count", [6, 40])
def test_spectra_are_numpys_and_ranks_scipys(count: int) -> None:
    scale = torch.logspace(0, -3, 10)
    features = 3 + scale * torch.randn(count, 10, generator=torch.Generator().manual_seed(0))
    layer = Gathered(lengths=[torch.ones(2, 3)])
    for part in features.split(7):
        layer.add(part)
    found, plain = summarise(layer), features.double().numpy()
    spectrum = scipy.linalg.svdvals(np.cov(plain, rowvar=False))
    assert found["singular_values"] == pytest.approx(spectrum.tolist(), rel=1e-5, abs=1e-10)
    for name, matrix in (("rankme", plain), ("effective_rank", plain - plain.mean(0))):
        values = scipy.linalg.svdvals(matrix)
        expected = np.exp(scipy.stats.entropy(values))  # which divides by the sum
        assert found[name] == pytest.approx(expected, rel=1e-4)


def test_known_ranks() -> None:
    assert rank_of(torch.ones(7)) == pytest.approx(7)
    assert rank_of(torch.tensor([2.0, 0.0, 0.0])) == pytest.approx(1)
    assert rank_of(torch.zeros(3)) == 0


def test_artefacts_are_long_beside_the_median_of_their_image() -> None:
    lengths = torch.ones(2, 10)
    lengths[0, 3], lengths[0, 7] = 5, 2.9
    lengths[1] *= 10  # an image of long tokens has none
    found = token_lengths(lengths, 3.0)
    assert found[:, 2].tolist() == [0.1, 0]
    assert found[:, 1].tolist() == [5, 10]
    assert found[0, 0] == pytest.approx((8 + 5 + 2.9) / 10)


@pytest.mark.parametrize("features", ["mean", "cls", "patches"])
def test_evaluation_measures_every_layer_and_draws(analyse: Analyse, features: str) -> None:
    drawn = features == "mean"
    results = analyse(
        "spectrum", small_recipe(), batch_size=4, features=features, folder=drawn, num_pictures=2
    )
    assert [row["layer"] for row in results["layers"]] == [0, 1, 2] and results["samples"] == 6
    assert results["vectors"] == (96 if features == "patches" else 6)
    for row in results["layers"][1:]:
        assert 1 < row["rankme"] <= min(32, results["vectors"])
        assert len(row["singular_values"]) == 32 and row["length"] <= row["longest"]
    assert results["pictures"] == (["spectrum.png", "lengths.png"] if drawn else [])
    other = analyse(
        "spectrum", small_recipe(), batch_size=6, features=features, layers=[2], folder=False
    )
    assert other["rankme"] == pytest.approx(results["rankme"], rel=1e-5)
