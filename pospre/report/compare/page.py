"""A comparison as one self-contained page: the report's style, several curves on common axes."""

from pospre.report.compare.runs import Comparison
from pospre.report.compare.table import BEYOND
from pospre.report.page import curve_titles, render_template
from pospre.report.plots import draw_charts


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
