"""Contrasts that are declared before anything is measured: pooled deviations, Holm, sentences.

A figure has a list of values, one for each seed, in every cell (a row of positions or tasks under
one host). Deviations over seeds are pooled over all cells of a figure. Pairing by seed gains
nothing: different schemes and tasks share no draw that moves the figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy.optimize import brentq
from scipy.stats import bartlett, nct
from scipy.stats import t as student

LEVEL = 0.05
POWER = 0.8

Cells = Mapping[tuple[str, str], Sequence[float]]
"""A figure of every seed, by (row, host)."""


@dataclass(frozen=True)
class Contrast:
    """``row`` − ``other`` of one figure: the mean difference over ``hosts``."""

    figure: str
    row: str
    other: str
    hosts: tuple[str, ...]

    def missing(self, cells: Cells) -> list[str]:
        """Return the cells without any value, in words."""
        pairs = [(row, host) for row in (self.row, self.other) for host in self.hosts]
        return [f"{row} × {host}" for row, host in pairs if not cells.get((row, host))]


@dataclass(frozen=True)
class Spread:
    """Deviation of a figure over seeds: pooled over its cells, with its degrees of freedom."""

    deviation: float
    freedom: int
    equal: float | None
    """Bartlett's p that all cells have this deviation; None if there are fewer than two cells."""


@dataclass(frozen=True)
class Result:
    """What a contrast came to: difference, its interval, runs on each side, adjusted p."""

    contrast: Contrast
    difference: float
    interval: tuple[float, float]
    runs: tuple[int, int]
    p: float

    @property
    def shown(self) -> bool:
        return self.p < LEVEL


def pooled(cells: Cells) -> Spread | None:
    """Return the spread over all cells with two or more seeds, None if no seeds differ."""
    several = [list(values) for values in cells.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    squares = sum((len(values) - 1) * variance(values) for values in several)
    if not squares:
        return None
    varied = [values for values in several if variance(values) > 0]
    equal = float(bartlett(*varied).pvalue) if len(varied) > 1 else None
    return Spread((squares / freedom) ** 0.5, freedom, equal)


def measured(contrast: Contrast, cells: Cells, spread: Spread) -> Result:
    """Return a contrast's result, with the p of this test alone."""
    sides = [
        [cells[row, host] for host in contrast.hosts] for row in (contrast.row, contrast.other)
    ]
    difference = fmean(map(fmean, sides[0])) - fmean(map(fmean, sides[1]))
    weight = sum(1 / len(values) for side in sides for values in side)
    error = spread.deviation * weight**0.5 / len(contrast.hosts)
    half = float(student.ppf(1 - LEVEL / 2, spread.freedom)) * error
    p = 2 * float(student.sf(abs(difference) / error, spread.freedom))
    runs = sum(map(len, sides[0])), sum(map(len, sides[1]))
    return Result(contrast, difference, (difference - half, difference + half), runs, p)


def adjusted(results: Sequence[Result], tests: int) -> list[Result]:
    """Return the results with Holm's p over a family of ``tests``, some perhaps not yet made."""
    ordered = sorted(results, key=lambda result: result.p)
    largest, by_contrast = 0.0, {}
    for rank, result in enumerate(ordered):
        largest = max(largest, min(1.0, (tests - rank) * result.p))
        by_contrast[result.contrast] = largest
    return [
        Result(r.contrast, r.difference, r.interval, r.runs, by_contrast[r.contrast])
        for r in results
    ]


def detectable(spread: Spread, runs: float, tests: int) -> float:
    """Return the difference found with 80 % power at Holm's first step, ``runs`` on each side."""
    error = spread.deviation * (2 / runs) ** 0.5
    bound = float(student.ppf(1 - LEVEL / tests / 2, spread.freedom))

    def excess(difference: float) -> float:
        return float(nct.sf(bound, spread.freedom, difference / error)) - POWER

    return float(brentq(excess, 0, 20 * error))


def sentence(result: Result, titles: Mapping[str, str]) -> str:
    """Return a result in words, in points of 100; a difference that is not shown is called so."""
    contrast = result.contrast
    low, high = (100 * bound for bound in result.interval)
    p = "< .001" if result.p < 0.001 else f"{result.p:.3f}".lstrip("0")
    figures = (
        f"{100 * result.difference:+.1f} points, 95 % {low:+.1f} to {high:+.1f}, "
        f"{result.runs[0]} and {result.runs[1]} runs, Holm's p {p}"
    )
    verdict = "" if result.shown else ": no difference shown"
    asked = f"{titles[contrast.figure]}, {' and '.join(contrast.hosts)}"
    return f"{asked}: {contrast.row} − {contrast.other}{verdict} ({figures})."
