"""Writes ``report.html``, a self-contained page about a run and its results.

The page loads nothing: style, curves and pictures are inline, and its content security policy
forbids everything else. All text from users (names, paths, recipe) is escaped.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import YamlLexer

from pospre.output import write_output
from pospre.report import measured, summary
from pospre.report.plots import Record, draw_charts, format_value
from pospre.report.run import (
    PICTURE_BUDGET,
    Knn,
    PatchPosition,
    PositionGrid,
    PositionPictures,
    Run,
    load_triples,
    load_views,
    parse_results,
    read_other,
    read_run,
)
from pospre.untrusted_json import is_number

HERE = Path(__file__).parent
# evaluations with their own section
SHOWN = ("position_grid", "position_pictures", "patch_position", "knn")
POSITIONS = {"position_grid", "patch_position"}  # they share a section
BLANK = (
    "For pictures of a single colour, which contain no information about places. It should stay "
    "near guessing; if it is well above, the model gets the positions from somewhere else."
)


def write_report(run_folder: str | Path, *, refresh: int | None = None) -> Path:
    """Write ``report.html`` into a run folder (atomically) and return its path.

    During training a browser reloads the page after ``refresh`` seconds.
    """
    context = {"refresh": refresh, **page_context(read_run(run_folder))}
    target = Path(run_folder) / "report.html"
    write_output(target, render_template("page.html.jinja", context))
    return target


def render_template(name: str, context: dict[str, Any]) -> str:
    """Return a template of this folder rendered with ``context``, in the page's style."""
    own = HERE / name.replace(".html.jinja", ".css")
    sheets = dict.fromkeys((HERE / "page.css", own))
    text = "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    style = Markup(text)  # our own files, not user text
    return _environment().get_template(name).render(style=style, **context)


@cache
def _environment() -> jinja2.Environment:
    """Return the template environment, cached because training updates its page often."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value: format_value(value, percent=True)
    environment.filters["number"] = format_value
    return environment


def page_context(run: Run) -> dict[str, Any]:
    """Return the template's variables."""
    grid = parse_results(run, "position_grid", PositionGrid)
    knn = parse_results(run, "knn", Knn)
    pictures = parse_results(run, "position_pictures", PositionPictures)
    patches = parse_results(run, "patch_position", PatchPosition)
    asked = summary.pretext_tasks_of(run)
    answering = {each.pretext_task.evaluation for each in asked}
    wanted = answering if run.algorithms else {"position_grid"}
    others = [name for name in run.evaluations if name not in SHOWN]
    budget = PICTURE_BUDGET // (2 * max(1, len(others)))
    return {
        "run": run,
        "asked": asked,
        "answered": answering,
        "wanted": wanted,
        "shown": SHOWN,
        "views": load_views(run),
        "subtitle": summary.subtitle(run),
        "verdict": summary.verdict(run, grid, patches, knn),
        "headline": summary.headline(run, grid, knn),
        "charts": draw_charts([run.records], curve_titles(run.records)),
        "watch_charts": draw_charts([run.records], watch_titles(run.records)),
        "warnings": [(w["step"], str(w.get("warning", ""))) for w in run.warnings],
        "grid": grid,
        "knn": knn,
        "pictures": pictures,
        "triples": load_triples(run, pictures.pictures) if pictures else [],
        "others": {name: read_other(run, name, budget) for name in others},
        "patches": patches,
        "has_positions": bool(wanted & POSITIONS or grid or pictures or patches),
        "command": partial(measured.evaluate_command, run),
        "published": partial(measured.published_beside, run),
        "measured_on": partial(summary.measured_on, run),
        "reproduce": measured.reproduce_commands(run),
        "environment": measured.environment(run),
        # safe: Pygments escapes the text and only adds <span class>
        "recipe_html": Markup(highlight(run.recipe_text, YamlLexer(), HtmlFormatter(nowrap=True))),
    }


def curve_titles(records: list[Record]) -> dict[str, dict[str, Any]]:
    """Return the keys to draw, with the title and options of each chart.

    These are losses, metrics, evaluations during training, learning rate and throughput.
    """
    terms = [key for key in _keys(records, "loss/") if key != "loss/total"]
    found: dict[str, dict[str, Any]] = {}
    for key in (["loss/total"] if len(terms) != 1 else []) + terms:
        found[key] = {"title": f"Loss · {key.removeprefix('loss/')}"}
    for key in _keys(records, "metric/"):
        rate = "accuracy" in key
        title = f"During training · {key.removeprefix('metric/').replace('_', ' ')}"
        words = BLANK if key.endswith("_blank_accuracy") else ""
        found[key] = {"title": title, "percent": rate, "from_zero": rate, "words": words}
    for key in _keys(records, "evaluation/"):
        _, name, figure = key.split("/", 2)
        shares = all(0 <= one[key] <= 1 for one in records if is_number(one.get(key)))
        if figure != "seconds":
            found[key] = {"title": f"{name} · {figure}", "percent": shares}
    found["lr"] = {"title": "Learning rate", "from_zero": True, "smooth": False}
    found["throughput"] = {"title": "Images per second", "from_zero": True}
    return found


def watch_titles(records: list[Record]) -> dict[str, dict[str, Any]]:
    """Return the same for monitoring: gradients, features, step times, and memory."""
    titles = {"gradient/": "Gradient norm", "features/": "Features", "time/": "Share of time"}
    charts: dict[str, dict[str, Any]] = {}
    for kind, title in titles.items():
        for key in _keys(records, kind):
            if any(record.get(key) for record in records):
                name = f"{title} · {key.removeprefix(kind).replace('_', ' ')}"
                charts[key] = {"title": name, "percent": kind == "time/", "from_zero": True}
    return {**charts, "memory": {"title": "Memory, GiB", "from_zero": True, "smooth": False}}


def _keys(records: list[Record], start: str) -> list[str]:
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key.startswith(start)]
