"""Curves: thinning keeps the extremes, gaps lift the pen, ticks are round numbers."""

import math

import numpy as np
import pytest

from pospre.reporting.plots import MAX_POINTS, draw_chart, format_value, smooth_curve, thin
from pospre.reporting.summary import format_seconds


@pytest.mark.parametrize("size", [1, 1999, 2000, 2001, 4000, 123_457])
def test_thinning_keeps_extremes_and_ends(size: int) -> None:
    values = np.random.default_rng(size).normal(size=size)
    kept = thin(values)
    assert len(kept) <= MAX_POINTS and np.all(np.diff(kept) > 0)
    assert {0, size - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())


def test_thinning_keeps_every_spike() -> None:
    values = np.zeros(100_000)
    spikes = np.arange(500, 100_000, 1000)
    values[spikes] = 1.0
    assert set(spikes.tolist()) <= set(thin(values).tolist())


def test_smoothing_keeps_a_line_straight() -> None:
    line = np.linspace(3, 7, 500)
    np.testing.assert_allclose(smooth_curve(line), line, rtol=1e-12)


def test_smoothing_flattens_noise() -> None:
    noise = np.random.default_rng(0).normal(size=4000)
    assert smooth_curve(noise)[100:-100].std() < 0.15


def test_pen_lifts_at_values_that_are_not_finite() -> None:
    values = [1.0, 2.0, math.nan, None, 3.0, 4.0]
    records = [{"step": i, "x": value} for i, value in enumerate(values)]
    chart = draw_chart([records], "x", title="x")
    assert chart is not None
    assert chart.lines[0].raw_path.count("M") == 2 and chart.lines[0].raw_path.count("L") == 2
    assert chart.lines[0].note == "2 of 6 logged values are not finite"


@pytest.mark.parametrize("values", [[], ["a"], [None], [True]])
def test_no_numbers_no_chart(values: list) -> None:
    records = [{"step": i, "x": value} for i, value in enumerate(values)]
    assert draw_chart([records], "x", title="x") is None


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-3.0] * 4])
def test_flat_curves_have_a_range(values: list[float]) -> None:
    chart = draw_chart([[{"step": i, "x": v} for i, v in enumerate(values)]], "x", title="x")
    assert chart is not None and len(chart.y_ticks) >= 2
    assert "nan" not in chart.lines[0].raw_path and "inf" not in chart.lines[0].raw_path


def test_ticks_are_round() -> None:
    records = [{"step": i, "x": 0.13 + i / 1000} for i in range(1, 800)]
    chart = draw_chart([records], "x", title="x")
    assert chart is not None
    assert [tick.label for tick in chart.x_ticks] == ["0", "200", "400", "600"]
    assert [tick.label for tick in chart.y_ticks] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"] or (
        [tick.label for tick in chart.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.5e-4, "1.5e-4"), (2.00693, "2.007"), (192_000, "192\u202f000"), (-0.5, "-0.5")],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "42 s"), (720, "12 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
