"""The table of positions: plain loops, scikit-learn's components, and whole evaluations."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from pospre.evaluation.analysis.field import (
    all_pairs_cosine,
    neighbour_cosine,
    position_vectors,
    principal_colours,
)
from pospre.nn.positions.sincos import sincos_positions
from pospre.training.build import build_model
from tests.evaluation.analysis.small import IJEPA, MAE, Analyse, small_recipe

FIELD = {**MAE, "crop_field": {"field_size": 6}}
WAVES = {**MAE, "crop_field": {}}
TABLE = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).double()


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_cosines_are_those_of_plain_loops() -> None:
    vectors = {(r, c): TABLE[r, c].numpy() for r in range(3) for c in range(4)}
    everyone, near = [], []
    for one, first in vectors.items():
        for other, second in vectors.items():
            if one < other:
                everyone.append(cosine(first, second))
                if abs(one[0] - other[0]) + abs(one[1] - other[1]) == 1:
                    near.append(everyone[-1])
    assert neighbour_cosine(TABLE) == pytest.approx(np.mean(near))
    assert all_pairs_cosine(TABLE.flatten(0, 1)) == pytest.approx(np.mean(everyone))


def test_components_are_scikit_learns() -> None:
    vectors = TABLE.flatten(0, 1)
    shares, colours = principal_colours(vectors)
    pca = PCA(3).fit(vectors.numpy())
    assert shares == pytest.approx(pca.explained_variance_ratio_.tolist())
    scores = pca.transform(vectors.numpy())
    for number in range(3):
        assert abs(np.corrcoef(scores[:, number], colours[:, number])[0, 1]) == pytest.approx(1)
    assert colours.amin(0).tolist() == [0, 0, 0] and colours.amax(0).tolist() == [1, 1, 1]


def test_vectors_are_the_fields_or_the_encoders() -> None:
    learned = build_model(small_recipe(FIELD))
    field = learned.encoder.get_parameter("positions.pos_embed")[0, 1:]
    assert torch.equal(position_vectors(learned), field.view(6, 6, 32))
    fixed = build_model(small_recipe(WAVES, positions="sincos"))
    expected = sincos_positions(32, 4, 4).view(4, 4, 32)
    torch.testing.assert_close(position_vectors(fixed), expected)
    torch.testing.assert_close(
        position_vectors(build_model(small_recipe(positions="sincos"))), expected
    )


@pytest.mark.parametrize(
    ("algorithms", "grid", "source"),
    [(FIELD, [6, 6], "crop_field"), ({"ijepa": IJEPA}, [4, 4], "learned")],
)
def test_evaluation_measures_and_draws(
    analyse: Analyse, algorithms: dict[str, Any], grid: list[int], source: str
) -> None:
    results = analyse("field", small_recipe(algorithms))
    assert (results["grid"], results["source"]) == (grid, source)
    assert results["norm"][1] <= results["norm"][0] <= results["norm"][2]
