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
from pospre.report.page import curve_titles, render_template
from pospre.report.plots import draw_charts, format_value
from pospre.report.run import Record, Run, read_run
from pospre.untrusted_json import is_number

_ABSENT = "–"
_SHARE = 10  # curves are compared by the mean of their last tenth
BEYOND = "* beyond two standard errors of the difference (independent samples)"


@dataclass(frozen=True)
class Row:
    """A line of a table: its title, and one cell for each column."""

    label: str
    cells: list[str]


@dataclass(frozen=True)
class Comparison:
    """Common figures of several runs, and the differences between their recipes.

    Attributes:
        runs: in the order given.
        names: unique names of the runs.
        step: the last step that all have logged.
        curves: mean of the last tenth of the steps up to it.
        figures: of all evaluations of any run, with standard errors; for two runs with their
            difference.
        recipe: dotted keys whose values differ.
        notes: figures that were measured differently.
    """

    runs: list[Run]
    names: list[str]
    step: int
    curves: list[Row]
    figures: list[Row]
    recipe: list[Row]
    notes: list[str]

    @property
    def figure_header(self) -> list[str]:
        """Column titles of ``figures``."""
        return [*self.names, "difference"] if len(self.names) == 2 else self.names


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Read run folders on this machine.

    Raises:
        UserError: one is not a run folder, is in a bucket, or is given twice.
    """
    seen: dict[Path, str] = {}
    for folder in folders:
        place = Path(folder).resolve()
        if place in seen:
            raise UserError(f"{folder} and {seen[place]} are the same run; give another one.")
        seen[place] = folder
    return [read_run(folder) for folder in folders]


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs.

    Raises:
        UserError: they have neither a curve nor an evaluation in common.
    """
    keys = _common_keys(runs)
    shared = set.intersection(*(set(run.evaluations) for run in runs))
    names = _names(runs)
    if not keys and not shared:
        raise UserError(
            f"{' and '.join(names)} have nothing in common: no curve, and no evaluation. "
            f"{names[0]} logged {', '.join(curve_keys(runs[0].records)) or 'nothing'}."
        )
    steps = [int(run.records[-1]["step"]) if run.records else 0 for run in runs]
    step = min(steps)
    figures, notes = _figure_rows(runs)
    return Comparison(
        runs=list(runs),
        names=names,
        step=step,
        curves=[Row("steps", [f"{value:,}" for value in steps]), *_curve_rows(runs, keys, step)],
        figures=figures,
        recipe=recipe_rows(runs),
        notes=notes,
    )


def recipe_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the dotted keys whose values differ between recipes, except for names."""
    plain = [dict(values(_complete(run))) for run in runs]
    keys = dict.fromkeys(key for each in plain for key in each)
    rows = [Row(key, [_spelled(each, key) for each in plain]) for key in keys]
    return [row for row in rows if len({*row.cells}) > 1 and row.label != "run_name"]


def mean_between(records: Sequence[Record], key: str, first: float, last: float) -> float | None:
    """Return the mean of a curve over the steps after ``first`` up to ``last``.

    None: nothing was logged there; NaN: a value was not finite.
    """
    found = [r[key] for r in records if key in r and first < r["step"] <= last]
    if not found:
        return None
    return fmean(float(value) if is_number(value) else math.nan for value in found)


def curve_keys(records: Sequence[Record]) -> list[str]:
    """Return the logged losses and metrics."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key.startswith(("loss/", "metric/"))]


def _complete(run: Run) -> dict[str, Any]:
    """Return a recorded recipe with all defaults."""
    source = f"{run.folder / 'recipe.yaml'}"
    return recorded_recipe(run.recipe, source).dump() if run.recipe else {}


def _spelled(plain: Mapping[str, Any], key: str) -> str:
    if key not in plain:
        return _ABSENT
    value = plain[key]
    return value if isinstance(value, str) else json.dumps(value)


def _common_keys(runs: Sequence[Run]) -> list[str]:
    others = [set(curve_keys(run.records)) for run in runs[1:]]
    return [key for key in curve_keys(runs[0].records) if all(key in keys for keys in others)]


def _curve_rows(runs: Sequence[Run], keys: Sequence[str], step: int) -> list[Row]:
    first = step - math.ceil(step / _SHARE)
    return [
        Row(key, [_shown(mean_between(run.records, key, first, step)) for run in runs])
        for key in keys
    ]


def _shown(value: float | None) -> str:
    if value is None:
        return _ABSENT
    return "not finite" if math.isnan(value) else format_value(value)


def _figure_rows(runs: Sequence[Run]) -> tuple[list[Row], list[str]]:
    rows, notes = [], []
    for name in dict.fromkeys(name for run in runs for name in run.evaluations):
        documents = [run.evaluations.get(name) for run in runs]
        found = [
            {} if document is None else {each.name: each for each in figures_in(document)}
            for document in documents
        ]
        for key in dict.fromkeys(key for figures in found for key in figures):
            figures = [each.get(key) for each in found]
            cells = [_ABSENT if figure is None else _number(figure) for figure in figures]
            rows.append(Row(f"{name} {key}", [*cells, *_difference(figures)]))
        notes += _unlike(name, [document for document in documents if document is not None])
    return rows, notes


def _number(figure: Figure) -> str:
    """Write a figure with its standard error."""
    error = "" if figure.error is None else f" ± {figure.error:.2g}"
    return format_value(figure.value) + error


def _difference(figures: Sequence[Figure | None]) -> list[str]:
    """Return the second figure minus the first with its standard error, for two runs.

    The runs are measured independently, so their variances add up.
    """
    if len(figures) != 2:
        return []
    first, second = figures
    if first is None or second is None:
        return [_ABSENT]
    change = f"{second.value - first.value:+.4g}"
    if first.error is None or second.error is None:
        return [change]
    error = math.hypot(first.error, second.error)
    beyond = " *" if abs(second.value - first.value) > 2 * error else ""
    return [f"{change} ± {error:.2g}{beyond}"]


def _unlike(name: str, documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe how an evaluation differs between runs in data or settings."""
    notes = []
    for key in ("data", "weights", "step", "settings"):
        kinds = {str(document.get(key)) for document in documents}
        if len(kinds) > 1:
            notes.append(f"{name}: {key} differ: {' | '.join(sorted(kinds))}")
    return notes


def _names(runs: Sequence[Run]) -> list[str]:
    """Return unique names of the runs; runs with the same name get their folders' names."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder)
        for name, run in zip(names, runs, strict=True)
    ]


def comparison_text(comparison: Comparison) -> str:
    """Return the tables of a comparison."""
    header = ["", *comparison.names]
    title = f"Curves: mean of the last tenth up to step {comparison.step}"
    tables = [format_table(title, header, [[row.label, *row.cells] for row in comparison.curves])]
    if comparison.figures:
        rows = [[row.label, *row.cells] for row in comparison.figures]
        notes = [*([BEYOND] if any("*" in row[-1] for row in rows) else []), *comparison.notes]
        columns = ["", *comparison.figure_header]
        tables.append(format_table("Evaluations ± standard error", columns, rows, notes))
    if comparison.recipe:
        rows = [[row.label, *row.cells] for row in comparison.recipe]
        tables.append(format_table("Recipes, where they differ", header, rows))
    else:
        tables.append("The recipes are the same.")
    return "\n\n".join(tables)


def comparison_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    records = [run.records for run in comparison.runs]
    titles = curve_titles([record for each in records for record in each])
    context = {
        "names": comparison.names,
        "subtitles": [" + ".join(run.algorithms) for run in comparison.runs],
        "folders": [str(run.folder) for run in comparison.runs],
        "step": comparison.step,
        "curves": comparison.curves,
        "charts": draw_charts(records, titles),
        "figures": comparison.figures,
        "figure_header": comparison.figure_header,
        "beyond": BEYOND,
        "notes": comparison.notes,
        "recipe": comparison.recipe,
    }
    return render_template("compare.html.jinja", context)
