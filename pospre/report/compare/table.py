"""A comparison, and a run beside a reference, as text for a terminal."""

from collections.abc import Sequence

from pospre.report.compare.reference import Check
from pospre.report.compare.runs import Comparison
from pospre.report.plots import format_value
from pospre.text_table import format_table

BEYOND = "* beyond two standard errors of the difference (independent samples)"


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
