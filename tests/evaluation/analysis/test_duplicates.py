"""Near duplicates: those that are planted are found, in whatever parts images are compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.evaluation.analysis import duplicates
from pospre.evaluation.analysis.duplicates import alarms, near_duplicates
from tests.evaluation.analysis.small import small_recipe
from tests.evaluation.checkpoints import results_of


@pytest.mark.parametrize("rows", [3, 8, 100])
def test_planted_ones_are_found(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_ROWS", rows)
    vectors = torch.eye(8)
    vectors[6] = 3 * vectors[1] + 0.1 * vectors[0]
    vectors[7] = vectors[2] + 0.01 * vectors[0]
    vectors[5] = vectors[4] + 0.2 * vectors[0]  # not near enough
    share, cosines, pairs = near_duplicates(vectors, 0.99)
    assert share == 0.5 and pairs == [[2, 7], [1, 6]]
    assert cosines == pytest.approx([1.0001**-0.5, 9 / (9 * 9.01) ** 0.5])
    monkeypatch.setattr(duplicates, "_LISTED", 1)
    assert near_duplicates(vectors, 0.99)[2] == [[2, 7]]
    assert near_duplicates(torch.eye(3), 0.99) == (0.0, [], [])


def test_a_copied_image_is_named(image_folder: Callable[..., Path]) -> None:
    images = image_folder(12, classes=())
    (images / "copy.jpg").write_bytes((images / "0003.jpg").read_bytes())
    given: dict[str, Any] = {"similarity": 0.9999999, "num_samples": 20}
    for features in ("cls", "mean"):
        results = results_of("duplicates", small_recipe(), images, features=features, **given)
        assert results["share"] == pytest.approx(2 / 13) and results["images"] == 13
        (pair,) = results["pairs"]
        assert {pair["image"], pair["another"]} == {"0003.jpg", "copy.jpg"}
        (line,) = alarms(results)
        assert line == "near duplicates: 15% of the images have one"
    assert alarms({"share": 0.05}) == []
