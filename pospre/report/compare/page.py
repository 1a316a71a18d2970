"""A comparison as one self-contained page: the report's style, several curves on common axes."""

from typing import Any

from pospre.report.compare.runs import Comparison
from pospre.report.compare.table import BEYOND, DIFFERENCE
from pospre.report.page import curve_titles, render_template
from pospre.report.plots import draw_charts


def comparison_page(comparison: Comparison) -> str:
    """Return the page as HTML."""
    return render_template("compare.html.jinja", page_context(comparison))


def page_context(comparison: Comparison) -> dict[str, Any]:
    """Return the template's variables."""
    header = comparison.names
    records = [run.records for run in comparison.runs]
    titles = curve_titles([record for each in records for record in each])
    return {
        "names": comparison.names,
        "subtitles": [" + ".join(run.algorithms) for run in comparison.runs],
        "folders": [str(run.folder) for run in comparison.runs],
        "step": comparison.step,
        "curves": comparison.curves,
        "charts": draw_charts(records, titles),
        "figures": comparison.figures,
        "figure_header": [*header, DIFFERENCE] if len(header) == 2 else header,
        "beyond": BEYOND,
        "notes": comparison.notes,
        "recipe": comparison.recipe,
    }
