"""Line charts for the page: SVG paths and ticks, thinned so that long runs stay small.

A chart is drawn in a 1000 x 300 box that the browser stretches to its width. Labels are HTML of
fixed size, so charts are legible on phones and wide screens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 1000, 300
MAX_POINTS = 2000
SMOOTH_FROM = 100  # curves with fewer points are not smoothed

Record = dict[str, Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tick(NamedTuple):
    """A label and its position on the axis, in percent from the left or the top."""

    position: float
    label: str


class Line(NamedTuple):
    """A curve of a run: ``raw_path`` as logged, ``line_path`` smoothed (empty if not needed)."""

    run: int
    last: str
    raw_path: str
    line_path: str
    note: str


class Chart(NamedTuple):
    """Curves of one or several runs on the same axes."""

    title: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    words: str  # describe the figure if its name is not clear


def draw_charts(
    runs: Sequence[Sequence[Record]], titles: Mapping[str, Mapping[str, Any]]
) -> list[Chart]:
    """Return the charts of the keys of ``titles``, which also has the options of ``draw_chart``."""
    charts = [draw_chart(runs, key, **options) for key, options in titles.items()]
    return [chart for chart in charts if chart is not None]


def draw_chart(
    runs: Sequence[Sequence[Record]],
    key: str,
    *,
    title: str,
    percent: bool = False,
    from_zero: bool = False,
    smooth: bool = True,
    words: str = "",
) -> Chart | None:
    """Draw ``record[key]`` of every run over ``step``; None if no run has a number there."""
    read = {number: _read_curve(records, key) for number, records in enumerate(runs)}
    curves = {number: curve for number, curve in read.items() if curve is not None}
    if not curves:
        return None
    everything = np.concatenate([curve.values for curve in curves.values()])
    y_step, low, high = _nice_range(everything, from_zero=from_zero)
    left = min(float(curve.steps[0]) for curve in curves.values())
    right = max(float(curve.steps[-1]) for curve in curves.values())
    left = 0.0 if 0 < left < 0.2 * right else left
    frame = _Frame(left, right, low, high)
    lines = []
    for number, (steps, values, gaps, note) in curves.items():
        raw, smoothed = frame.path(steps, values, gaps), ""
        if smooth and len(values) >= SMOOTH_FROM:
            smoothed = frame.path(steps, smooth_curve(values), gaps)
        last = format_value(values[-1], percent=percent)
        lines.append(Line(number, last, raw, smoothed, note))
    y_ticks = frame.y_ticks(y_step, percent=percent)
    return Chart(title, lines, frame.x_ticks(), y_ticks, words)


class _Curve(NamedTuple):
    """The finite values of a curve; ``gaps`` counts the dropped ones before each."""

    steps: Floats
    values: Floats
    gaps: Ints
    note: str


def _read_curve(records: Sequence[Record], key: str) -> _Curve | None:
    points = [(r["step"], r[key]) for r in records if _is_value(r.get(key, ""))]
    table = np.array([(s, math.nan if v is None else v) for s, v in points], dtype=np.float64)
    finite = np.isfinite(table[:, 1]) if points else np.zeros(0, dtype=bool)
    if not finite.any():
        return None
    lost = int((~finite).sum())
    note = f"{lost} of {len(points)} logged values are not finite" if lost else ""
    steps, values = table[finite].T
    return _Curve(steps, values, np.cumsum(~finite)[finite], note)


def thin(values: Floats, limit: int = MAX_POINTS) -> Ints:
    """Return sorted indices, at most ``limit``, that keep each stretch's minimum and maximum."""
    size = len(values)
    if size <= limit:
        return np.arange(size)
    edges = np.linspace(0, size, (limit - 2) // 2 + 1).astype(np.int64)
    keep = {0, size - 1}
    for start, stop in itertools.pairwise(edges.tolist()):
        keep.add(start + int(np.argmin(values[start:stop])))
        keep.add(start + int(np.argmax(values[start:stop])))
    return np.array(sorted(keep), dtype=np.int64)


def smooth_curve(values: Floats) -> Floats:
    """Return the mean over a centred window of about 1/40 of the curve, narrower at its ends."""
    size = len(values)
    half = max(1, size // 80)
    index = np.arange(size)
    reach = np.minimum(half, np.minimum(index, size - 1 - index))  # symmetric, so without lag
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def format_value(value: float, *, percent: bool = False) -> str:
    """Format a number: four digits, ``1.5e-4`` if tiny, ``12 300`` if large."""
    if percent:
        return f"{100 * value:.1f} %"
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.4g}"


class _Frame(NamedTuple):
    """The data range of a chart."""

    left: float
    right: float
    low: float
    high: float

    def path(self, steps: Floats, values: Floats, gaps: Ints) -> str:
        """Return the SVG path; the pen lifts at values that are not finite."""
        keep = thin(values)
        x = (steps[keep] - self.left) / max(self.right - self.left, 1e-12) * WIDTH
        y = (self.high - values[keep]) / (self.high - self.low) * HEIGHT
        lifts = np.diff(gaps[keep], prepend=-1) != 0
        points = zip(x, y, lifts, strict=True)
        path = "".join(f"{'M' if lift else 'L'}{a:.1f} {b:.1f}" for a, b, lift in points)
        return path + ("h0" if len(keep) == 1 else "")

    def x_ticks(self) -> list[Tick]:
        span = self.right - self.left
        if span <= 0:
            return [Tick(0, _tick_label(self.left, 1))]
        step = max(1.0, _nice_step(span / 4))
        first = math.ceil(self.left / step) * step
        marks = np.arange(first, self.right + step * 1e-6, step)
        return [Tick(100 * (m - self.left) / span, _tick_label(m, step)) for m in marks]

    def y_ticks(self, step: float, *, percent: bool) -> list[Tick]:
        marks = np.arange(round(self.low / step), round(self.high / step) + 1) * step
        scale = 100 if percent else 1
        labels = [_tick_label(m * scale, step * scale) + (" %" if percent else "") for m in marks]
        positions = 100 * (self.high - marks) / (self.high - self.low)
        return [Tick(float(p), label) for p, label in zip(positions, labels, strict=True)]


def _is_value(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _nice_step(rough: float) -> float:
    """Round ``rough`` up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def _nice_range(values: Floats, *, from_zero: bool) -> tuple[float, float, float]:
    """Return the tick step, and a range of whole steps that contains every value."""
    low, high = float(values.min()), float(values.max())
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 1.0
        low, high = low - margin, high + margin
    step = _nice_step((high - low) / 4)
    bottom, top = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return step, bottom * step, max(top, bottom + 1) * step


def _tick_label(value: float, step: float) -> str:
    if abs(value) < step * 1e-6:
        return "0"
    if step < 1e-3:
        return format_value(value)
    if abs(value) >= 10_000:
        big, unit = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / big:.4g}{unit}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
