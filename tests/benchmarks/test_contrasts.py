"""The statistics of the position table, against numbers computed by hand and by simulation."""

import numpy as np
import pytest
from scipy.stats import ttest_ind

from tests.benchmarks.contrasts import (
    Contrast,
    Spread,
    adjusted,
    detectable,
    measured,
    pooled,
    sentence,
)

CELLS = {("a", "mae"): [0.1, 0.2, 0.3], ("b", "mae"): [0.5, 0.6, 0.7], ("b", "other"): [0.4]}
CONTRAST = Contrast("knn/top1", "b", "a", ("mae",))


def test_two_cells_give_the_t_test_of_two_samples() -> None:
    spread = pooled(CELLS)
    assert spread is not None and spread.freedom == 4
    assert spread.deviation == pytest.approx(0.1) and spread.equal == pytest.approx(1)
    result = measured(CONTRAST, CELLS, spread)
    oracle = ttest_ind(CELLS["b", "mae"], CELLS["a", "mae"])
    assert result.difference == pytest.approx(0.4) and result.runs == (3, 3)
    assert result.p == pytest.approx(oracle.pvalue)
    assert result.interval == pytest.approx(tuple(oracle.confidence_interval()))
    assert pooled({("b", "other"): [0.4]}) is None
    assert pooled({("b", "other"): [0.4, 0.4]}) is None  # no error to divide by


def test_a_main_effect_is_the_mean_over_hosts_with_half_the_error() -> None:
    cells = CELLS | {("a", "other"): [0.2, 0.3, 0.4], ("b", "other"): [0.3, 0.4, 0.5]}
    both = Contrast("knn/top1", "b", "a", ("mae", "other"))
    one, two = (measured(each, cells, Spread(0.1, 8, None)) for each in (CONTRAST, both))
    assert two.difference == pytest.approx(0.25) and two.runs == (6, 6)
    widths = [high - low for low, high in (one.interval, two.interval)]
    assert widths[0] / widths[1] == pytest.approx(2**0.5)


def test_holm_counts_tests_that_are_not_made_yet() -> None:
    spread = Spread(0.1, 30, None)
    cells = {(row, "mae"): [value] * 3 for row, value in zip("abc", (0.1, 0.4, 0.2), strict=True)}
    results = [measured(Contrast("f", row, "a", ("mae",)), cells, spread) for row in "bc"]
    first, second = adjusted(results, tests=9)
    assert first.p == pytest.approx(9 * results[0].p)
    assert second.p == pytest.approx(min(1, 8 * results[1].p))
    assert first.shown and not second.shown
    assert "no difference shown" in sentence(second, {"f": "kNN"})
    assert sentence(first, {"f": "kNN"}).startswith("kNN, mae: b − a (+30.0 points, 95 % +13.")


@pytest.mark.parametrize(
    ("deviation", "freedom", "points"),
    [(0.91, 34, (2.8, 2.2, 2.0, 1.6, 1.2)), (0.76, 22, (2.4, 1.8, 1.7, 1.4, 1.0))],
)
def test_power_of_so_many_runs(deviation: float, freedom: int, points: tuple[float, ...]) -> None:
    spread = Spread(deviation, freedom, None)
    for runs, wanted in zip((3, 5, 6, 9, 18), points, strict=True):
        assert detectable(spread, runs, tests=10) == pytest.approx(wanted, abs=0.15)


def test_the_detectable_difference_is_found_in_four_of_five_tables() -> None:
    generator = np.random.default_rng(0)
    wanted = detectable(Spread(1.0, 8, None), 3, tests=1)
    found = 0
    for _ in range(400):
        values = generator.normal(size=(4, 3))
        values[1] += wanted
        cells = {(row, "mae"): list(own) for row, own in zip("abcd", values, strict=True)}
        spread = pooled(cells)
        assert spread is not None
        found += measured(Contrast("f", "b", "a", ("mae",)), cells, spread).p < 0.05
    assert found / 400 == pytest.approx(0.8, abs=0.06)
