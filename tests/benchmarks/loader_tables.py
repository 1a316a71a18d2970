"""Figures of loaders to tables: medians, ratios, Markdown, JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NONE = "–"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: of the loader.
        value: what is compared: the median over the runs.
        ratios: to each reference, by its name; None without one.
        more: other cells, by their column.
        runs: what ``value`` is the median of.
    """

    name: str
    value: float
    ratios: dict[str, float | None]
    more: dict[str, str] = field(default_factory=dict)
    runs: Sequence[float] = ()


@dataclass(frozen=True)
class Table:
    """What one case gave.

    Attributes:
        case: its name on the command line.
        title: what was measured.
        unit: of the values.
        rows: the loaders.
    """

    case: str
    title: str
    unit: str
    rows: list[Row]

    def content(self) -> dict[str, Any]:
        """Return what goes into the JSON file."""
        return asdict(self)


def median_ratio(values: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the median of the ratios of each run, whose speeds drift together."""
    ratios = [one / other for one, other in zip(values, reference, strict=False)]
    return statistics.median(ratios) if ratios else None


def best(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> Sequence[float]:
    """Return the values of the one among ``names`` with the highest median; empty without any."""
    known = [rates[name] for name in names if rates.get(name)]
    return max(known, key=statistics.median, default=())


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
    chosen = {column: best(rates, names) for column, names in references.items()}
    return [
        Row(
            name,
            statistics.median(values),
            {column: median_ratio(values, other) for column, other in chosen.items()},
            {column: cells.get(name, NONE) for column, cells in (more or {}).items()},
            list(values),
        )
        for name, values in rates.items()
        if values
    ]


def markdown(table: Table) -> str:
    """Return a table to read."""
    if not table.rows:
        return f"**{table.title}**\n\nnothing could be measured"
    ratios, more = list(table.rows[0].ratios), list(table.rows[0].more)
    lines = [
        f"**{table.title}**",
        "",
        "| " + " | ".join(["loader", table.unit, *ratios, *more]) + " |",
        "|---" * (2 + len(ratios) + len(more)) + "|",
    ]
    for row in table.rows:
        cells = [NONE if row.ratios[name] is None else f"{row.ratios[name]:.2f}" for name in ratios]
        cells += [row.more[name] for name in more]
        lines.append("| " + " | ".join([row.name, f"{row.value:.0f}", *cells]) + " |")
    return "\n".join(lines)
