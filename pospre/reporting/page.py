"""Writes ``report.html``, a self-contained page about a run and its results.

The page loads nothing: style, curves and pictures are inline, and its content security policy
forbids everything else. All text from users (names, paths, recipe) is escaped.
"""

import base64
import io
import itertools
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from PIL import Image
from pydantic import BaseModel, Field
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import YamlLexer

from pospre.evaluation.figures import error_of
from pospre.output import write_output
from pospre.recipe.yaml_text import LARGEST
from pospre.reporting import adaptation, measured, summary
from pospre.reporting.plots import Record, draw_charts, format_value
from pospre.reporting.run import (
    PatchPosition,
    PictureFiles,
    PositionGrid,
    PositionPictures,
    Run,
    parse_classified,
    parse_results,
    read_run,
)
from pospre.untrusted_file import read_inside
from pospre.untrusted_json import is_number

HERE = Path(__file__).parent
# evaluations with their own section
SHOWN = ("position_grid", "position_pictures", "patch_position", "knn", "drift")
POSITIONS = {"position_grid", "patch_position"}  # they share a section
BLANK = (
    "For pictures of a single colour, which contain no information about places. It should stay "
    "near guessing; if it is well above, the model gets the positions from somewhere else."
)
MAX_CHARTS, MAX_FIGURES, MAX_PICTURES = 200, 200, 24
MAX_PIXELS = 50_000_000  # of a picture's file: 200 MB in memory
PICTURE_BUDGET = 1_500_000  # bytes of base64 for these; half as many for other evaluations'
# pictures. With the views of a step the page stays under 3 MB
PICTURE_SIZES = ((320, 90), (256, 85), (192, 80), (128, 70))  # longest side, JPEG quality
VIEWS, VIEWS_INDEX = "views", "views.json"


def write_report(run_folder: str | Path, *, refresh: int | None = None) -> Path:
    """Write ``report.html`` into a run folder (atomically) and return its path.

    During training a browser reloads the page after ``refresh`` seconds.
    """
    return write_page(read_run(run_folder), refresh=refresh)


def write_page(run: Run, *, refresh: int | None = None) -> Path:
    """Do the same for a run that was read; ``run.left_out`` then has all that the page lacks."""
    context = {"refresh": refresh, **page_context(run)}
    target = run.folder / "report.html"
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
    classified = parse_classified(run)
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
        "verdict": summary.verdict(run, grid, patches, classified),
        "adapted": adaptation.sentence(run),
        "drift": adaptation.drift_tables(run),
        "headline": summary.headline(run, grid, classified),
        "charts": draw_charts([run.records], _some(run, curve_titles(run.records))),
        "watch_charts": draw_charts([run.records], _some(run, watch_titles(run.records))),
        "warnings": [(w["step"], str(w.get("warning", ""))) for w in run.warnings],
        "grid": grid,
        "classified": classified,
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
    terms = [key for key in logged_keys(records, "loss/") if key != "loss/total"]
    titles: dict[str, dict[str, Any]] = {}
    for key in (["loss/total"] if len(terms) != 1 else []) + terms:
        titles[key] = {"title": f"Loss · {key.removeprefix('loss/')}"}
    for key in logged_keys(records, "metric/"):
        rate = "accuracy" in key
        title = f"During training · {key.removeprefix('metric/').replace('_', ' ')}"
        words = BLANK if "_blank_" in key else ""
        titles[key] = {"title": title, "percent": rate, "from_zero": rate, "words": words}
    for key in logged_keys(records, "evaluation/"):
        name, _, figure = key.removeprefix("evaluation/").partition("/")
        shares = all(0 <= one[key] <= 1 for one in records if is_number(one.get(key)))
        if figure != "seconds":
            titles[key] = {"title": f"{name} · {figure}", "percent": shares}
    titles["lr"] = {"title": "Learning rate", "from_zero": True, "smooth": False}
    titles["throughput"] = {"title": "Images per second", "from_zero": True}
    return titles


def _some(run: Run, titles: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the first ``MAX_CHARTS`` titles, and note how many more there are."""
    if len(titles) > MAX_CHARTS:
        run.left_out.append(f"{len(titles) - MAX_CHARTS} of {len(titles)} curves")
    return dict(itertools.islice(titles.items(), MAX_CHARTS))


def watch_titles(records: list[Record]) -> dict[str, dict[str, Any]]:
    """Return the same for monitoring: gradients, features, step times, and memory."""
    titles = {"gradient/": "Gradient norm", "features/": "Features", "time/": "Share of time"}
    charts: dict[str, dict[str, Any]] = {}
    for kind, title in titles.items():
        for key in logged_keys(records, kind):
            if any(record.get(key) for record in records):
                name = f"{title} · {key.removeprefix(kind).replace('_', ' ')}"
                charts[key] = {"title": name, "percent": kind == "time/", "from_zero": True}
    return {**charts, "memory": {"title": "Memory, GiB", "from_zero": True, "smooth": False}}


def logged_keys(records: Sequence[Record], *starts: str) -> list[str]:
    """Return the logged keys that begin with one of ``starts``."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [key for key in keys if key.startswith(starts)]


class ViewGroup(BaseModel):
    """Strips of a group's views, and the meaning of grey and green in them."""

    name: str
    legend: str
    files: list[str] = Field(max_length=MAX_PICTURES)


class Views(BaseModel):
    """The views drawn by ``live_page.py``."""

    step: int
    groups: list[ViewGroup] = Field(max_length=MAX_PICTURES)


class Other(NamedTuple):
    """An evaluation without its own section."""

    figures: dict[str, str]  # single numbers, with standard errors if it gives them, and texts
    pictures: dict[str, str]  # data URIs by name


def load_triples(
    run: Run, pictures: Sequence[PictureFiles]
) -> list[tuple[PictureFiles, dict[str, str]]]:
    """Return the first pictures with their views, in the best quality that fits the budget."""
    chosen = pictures[:MAX_PICTURES]
    folder = run.folder / "evaluation" / "position_pictures"
    views = ("original", "shuffled", "reconstructed")
    opened = [(p, [_open_picture(run, folder, getattr(p, view)) for view in views]) for p in chosen]
    whole = [(p, [image for image in row if image is not None]) for p, row in opened]
    whole = [(p, row) for p, row in whole if len(row) == len(views)]
    for side, quality in PICTURE_SIZES:
        rows = [[_data_uri(image, side, quality) for image in row] for _, row in whole]
        if sum(len(uri) for row in rows for uri in row) <= PICTURE_BUDGET:
            break
    return [
        (p, dict(zip(views, row, strict=True))) for (p, _), row in zip(whole, rows, strict=True)
    ]


def load_views(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return name, legend and pictures (data URIs) of the view groups; empty: none were drawn."""
    folder = run.folder / VIEWS
    index = folder / VIEWS_INDEX
    if not index.exists():
        return []
    try:
        views = Views.model_validate_json(read_inside(run.folder, index, LARGEST))
    except ValueError as error:  # of pydantic, too
        run.left_out.append(f"{index} is invalid ({str(error).splitlines()[0]}); delete {folder}")
        return []
    strips = []
    for group in views.groups:
        images = [_open_picture(run, folder, name) for name in group.files]
        uris = [_data_uri(image, 1100, 80) for image in images if image is not None]
        strips.append((f"{group.name}, step {views.step}", group.legend, uris))
    return strips


def read_other(run: Run, name: str, budget: int) -> Other:
    """Return the figures and pictures of an evaluation.

    Its pictures are shrunk to ``budget`` bytes of base64 together, and the last ones left out.
    """
    folder, results = run.folder / "evaluation" / name, run.evaluations[name]["results"]
    figures = {}
    for key, value in itertools.islice(results.items(), MAX_FIGURES):
        error = error_of(results, key)
        if isinstance(value, str | bool):
            figures[key] = str(value)
        elif is_number(value) and not key.endswith("_se") and key != "standard_error":
            spread = f" ± {format_value(error)}" if is_number(error) else ""
            figures[key] = format_value(value) + spread
    named = results.get("pictures")
    names = [file for file in named if isinstance(file, str)] if isinstance(named, list) else []
    pictures: dict[str, str] = {}
    for file in names[:MAX_PICTURES]:
        image = _open_picture(run, folder, file)
        if image is None:
            continue
        uris = (_data_uri(image, side, 85) for side in (1400, 1000, 700, 400))
        left = budget - sum(map(len, pictures.values()))
        fitting = next((uri for uri in uris if len(uri) <= left / 2 or len(uri) < 60_000), None)
        if fitting is not None and len(fitting) <= left:
            pictures[file] = fitting
    return Other(figures, pictures)


def _open_picture(run: Run, folder: Path, name: str) -> Image.Image | None:
    """Return a PNG or JPEG in a folder of the run; None if it is left out, with a line."""
    path = folder / name
    try:
        content = io.BytesIO(read_inside(run.folder, path, MAX_PIXELS))
        with Image.open(content, formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"its {image.width} x {image.height} pixels are too many")
            return image.convert("RGB")
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        run.left_out.append(f"picture {path} ({error}); run the evaluation again")
        return None


def _data_uri(image: Image.Image, side: int, quality: int) -> str:
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # 4:4:4 chroma: otherwise the edges of black, empty patches would bleed
    small.save(buffer, "JPEG", quality=quality, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
