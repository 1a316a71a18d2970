"""Comparison of several runs: their curves, evaluations and recipes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pospre.errors import UserError
from pospre.evaluation.figures import Figure, figures_in
from pospre.output import format_table
from pospre.recipe.provenance import values
from pospre.recipe.recipe import recorded_recipe
from pospre.reporting.page import curve_titles, logged_keys, render_template
from pospre.reporting.plots import Record, draw_charts, format_value
from pospre.reporting.run import Run, read_run
from pospre.untrusted_json import is_number

_ABSENT = "–"
_SHARE = 10  # curves are compared by the mean of their last tenth
BEYOND = "* beyond two standard errors of the difference (independent samples)"

Row = list[str]
"""A line of a table: its title, and a cell for each run."""


@dataclass(frozen=True)
class Comparison:
    """Common figures of several runs, and the differences between their recipes."""

    runs: list[Run]  # in the order given
    names: list[str]  # unique
    step: int  # the last that all have logged
    curves: list[Row]  # mean of the last tenth of the steps up to it
    figures: list[Row]  # of all evaluations of any run; for two runs with their difference
    recipe: list[Row]  # dotted keys whose values differ
    notes: list[str]  # figures that were measured differently

    @property
    def figure_header(self) -> list[str]:
        """Column titles of ``figures``."""
        return [*self.names, "difference"] if len(self.names) == 2 else self.names


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Read run folders on this machine, each given once."""
    seen: dict[Path, str] = {}
    for folder in folders:
        path = Path(folder).resolve()
        if path in seen:
            raise UserError(f"{folder} and {seen[path]} are the same run; give another one.")
        seen[path] = folder
    return [read_run(folder) for folder in folders]


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs, which must have a curve or an evaluation in common."""
    first, *others = [curve_keys(run.records) for run in runs]
    keys = [key for key in first if all(key in other for other in others)]
    names = [run.name for run in runs]
    names = [
        name if names.count(name) == 1 else str(run.folder)
        for name, run in zip(names, runs, strict=True)
    ]
    if not keys and not set.intersection(*(set(run.evaluations) for run in runs)):
        raise UserError(
            f"{' and '.join(names)} have nothing in common: no curve, and no evaluation. "
            f"{names[0]} logged {', '.join(first) or 'nothing'}."
        )
    steps = [last_step(run) for run in runs]
    step = min(steps)
    start = step - math.ceil(step / _SHARE)
    curves = [
        [key, *(_shown(mean_between(run.records, key, start, step)) for run in runs)]
        for key in keys
    ]
    figures, notes = _figure_rows(runs)
    return Comparison(
        runs=list(runs),
        names=names,
        step=step,
        curves=[["steps", *(f"{value:,}" for value in steps)], *curves],
        figures=figures,
        recipe=recipe_rows(runs),
        notes=notes,
    )


def recipe_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the dotted keys whose values differ between recipes, except for names."""
    plain = [dict(values(_complete(run))) for run in runs]
    keys = dict.fromkeys(key for each in plain for key in each)
    rows = [[key, *(_spelled(each, key) for each in plain)] for key in keys]
    return [row for row in rows if len({*row[1:]}) > 1 and row[0] != "run_name"]


def mean_between(records: Sequence[Record], key: str, first: float, last: float) -> float | None:
    """Return the mean of a curve over the steps after ``first`` up to ``last``.

    None: nothing was logged there; NaN: a value was not finite.
    """
    values = [r[key] for r in records if key in r and first < r["step"] <= last]
    if not values:
        return None
    return fmean(float(value) if is_number(value) else math.nan for value in values)


def curve_keys(records: Sequence[Record]) -> list[str]:
    """Return the logged losses and metrics."""
    return logged_keys(records, "loss/", "metric/")


def last_step(run: Run) -> int:
    """Return the last logged step; 0 if there is none."""
    return int(run.records[-1]["step"]) if run.records else 0


def _complete(run: Run) -> dict[str, Any]:
    """Return a recorded recipe with all defaults."""
    source = str(run.folder / "recipe.yaml")
    return recorded_recipe(run.recipe, source).dump() if run.recipe else {}


def _spelled(plain: Mapping[str, Any], key: str) -> str:
    value = plain.get(key, _ABSENT)
    return value if isinstance(value, str) else json.dumps(value)


def _shown(value: float | None) -> str:
    if value is None:
        return _ABSENT
    return "not finite" if math.isnan(value) else format_value(value)


def _figure_rows(runs: Sequence[Run]) -> tuple[list[Row], list[str]]:
    """Return a row for every figure of any run, and how an evaluation differs between runs."""
    rows, notes = [], []
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        documents = [run.evaluations.get(name) for run in runs]
        per_run = [
            {} if document is None else {each.name: each for each in figures_in(document)}
            for document in documents
        ]
        for key in dict.fromkeys(key for figures in per_run for key in figures):
            figures = [each.get(key) for each in per_run]
            cells = [
                _ABSENT if figure is None else format_value(figure.value) + figure.spread
                for figure in figures
            ]
            cells += [_difference(*figures)] if len(figures) == 2 else []
            rows.append([f"{name} {key}", *cells])
        for key in ("data", "weights", "step", "settings", "chance"):  # the last is a result
            kinds = {str(each.get(key, each["results"].get(key))) for each in documents if each}
            if len(kinds) > 1:
                notes.append(f"{name}: {key} differ: {' | '.join(sorted(kinds))}")
    return rows, notes


def _difference(first: Figure | None, second: Figure | None) -> str:
    """Return the second figure minus the first with its standard error.

    The runs are measured independently, so their variances add up.
    """
    if first is None or second is None:
        return _ABSENT
    change = second.value - first.value
    if first.error is None or second.error is None:
        return f"{change:+.4g}"
    error = math.hypot(first.error, second.error)
    return f"{change:+.4g} ± {error:.2g}{' *' if abs(change) > 2 * error else ''}"


def comparison_text(comparison: Comparison) -> str:
    """Return the tables of a comparison."""
    header = ["", *comparison.names]
    title = f"Curves: mean of the last tenth up to step {comparison.step}"
    tables = [format_table(title, header, comparison.curves)]
    if rows := comparison.figures:
        notes = [*([BEYOND] if any("*" in row[-1] for row in rows) else []), *comparison.notes]
        columns = ["", *comparison.figure_header]
        tables.append(format_table("Evaluations ± standard error", columns, rows, notes))
    if comparison.recipe:
        tables.append(format_table("Recipes, where they differ", header, comparison.recipe))
    else:
        tables.append("The recipes are the same.")
    return "\n\n".join(tables)


def comparison_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    records = [run.records for run in comparison.runs]
    titles = curve_titles([record for each in records for record in each])
    charts = draw_charts(records, titles)
    context = {"comparison": comparison, "charts": charts, "beyond": BEYOND, **vars(comparison)}
    return render_template("compare.html.jinja", context)
