"""A comparison, and a run beside a reference, as text for a terminal."""

from collections.abc import Sequence

from pospre.evaluation.table import format_table
from pospre.report.compare.reference import Check
from pospre.report.compare.runs import Comparison
from pospre.report.plots import format_value

DIFFERENCE = "difference"
BEYOND = "* beyond two standard errors of the difference (independent samples)"


def comparison_text(comparison: Comparison) -> str:
    """Return the tables of a comparison."""
    names, two = comparison.names, len(comparison.names) == 2
    title = f"Curves: mean of the last tenth up to step {comparison.step}"
    tables = [_table(title, names, [[row.label, *row.cells] for row in comparison.curves])]
    if comparison.figures:
        header = [*names, DIFFERENCE] if two else names
        rows = [[row.label, *row.cells] for row in comparison.figures]
        notes = [*([BEYOND] if any("*" in row[-1] for row in rows) else []), *comparison.notes]
        tables.append(_table("Evaluations ± standard error", header, rows, notes))
    if comparison.recipe:
        rows = [[row.label, *row.cells] for row in comparison.recipe]
        tables.append(_table("Recipes, where they differ", names, rows))
    else:
        tables.append("The recipes are the same.")
    return "\n\n".join(tables)


def reference_text(checks: Sequence[Check], name: str) -> str:
    """Return a table of a run beside the band of a reference, and what it says."""
    rows = [
        [
            check.curve,
            f"{check.first + 1}–{check.last}",
            "–" if check.value is None else format_value(check.value),
            format_value(check.low),
            format_value(check.high),
            "" if check.is_inside else "outside",
        ]
        for check in checks
    ]
    header = ["curve", "steps", name, "low", "high", ""]
    outside = [check for check in checks if not check.is_inside]
    verdict = f"{name} stays in the band: {len(checks)} of {len(checks)} windows"
    if outside:
        first = min(outside, key=lambda check: check.last)
        verdict = (
            f"{name} leaves the band in {len(outside)} of {len(checks)} windows, first "
            f"{first.curve} at steps {first.first + 1}–{first.last}"
        )
    return format_table("Beside the reference", header, rows, [verdict])


def _table(
    title: str, names: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    return format_table(title, ["", *names], rows, notes)
