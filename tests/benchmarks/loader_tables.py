"""Figures of loaders to tables: medians, ratios, Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pospre.output import markdown_table

NONE = "–"


@dataclass(frozen=True)
class Row:
    """A loader's line of a table."""

    name: str
    value: float  # what is compared: the median over the runs
    ratios: dict[str, float | None]  # to each reference, by its name; None without one
    more: dict[str, str] = field(default_factory=dict)  # other cells, by their column


@dataclass(frozen=True)
class Table:
    """What one case gave."""

    title: str
    unit: str  # of the values
    rows: list[Row]


def median_ratio(values: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the median of the ratios of each run, whose speeds drift together."""
    ratios = [one / other for one, other in zip(values, reference, strict=False)]
    return statistics.median(ratios) if ratios else None


def rate_rows(
    rates: Mapping[str, Sequence[float]],
    references: Mapping[str, Sequence[str]],
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Row]:
    """Return a row per loader.

    Args:
        rates: images per second of each loader in each run; the n-th runs of all belong together.
        references: column to the loaders, the best of which it compares with.
        more: column to further cells, by loader.
    """
    chosen: dict[str, Sequence[float]] = {}
    for column, names in references.items():
        known = [rates[name] for name in names if rates.get(name)]
        chosen[column] = max(known, key=statistics.median, default=())
    return [
        Row(
            name,
            statistics.median(values),
            {column: median_ratio(values, other) for column, other in chosen.items()},
            {column: cells.get(name, NONE) for column, cells in (more or {}).items()},
        )
        for name, values in rates.items()
        if values
    ]


def markdown(table: Table) -> str:
    if not table.rows:
        return f"**{table.title}**\n\nnothing could be measured"
    ratios, more = list(table.rows[0].ratios), list(table.rows[0].more)
    rows = []
    for row in table.rows:
        cells = [NONE if row.ratios[name] is None else f"{row.ratios[name]:.2f}" for name in ratios]
        rows.append([row.name, f"{row.value:.0f}", *cells, *(row.more[name] for name in more)])
    text = markdown_table(["loader", table.unit, *ratios, *more], rows)
    return f"**{table.title}**\n\n{text}"
