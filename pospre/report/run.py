"""Reads a run folder: recipe, logged metrics, evaluations and pictures."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from pospre.errors import UserError
from pospre.evaluation.figures import error_of, read_documents
from pospre.model.pretext_task import PRETEXT_TASKS, PretextTask, from_json
from pospre.object_store import is_remote
from pospre.recipe.yaml_text import read_mapping
from pospre.report.plots import Record, format_value
from pospre.untrusted_json import is_number, parse_json

MAX_PICTURES = 24
PICTURE_BUDGET = 1_500_000  # bytes of base64 for these; half as many for other evaluations'
# pictures. With the views of a step the page stays under 3 MB
PICTURE_SIZES = ((320, 90), (256, 85), (192, 80), (128, 70))  # longest side, JPEG quality
VIEWS, VIEWS_INDEX = "views", "views.json"

Results = TypeVar("Results", bound=BaseModel)


@dataclass(frozen=True)
class Run:
    """One run folder; missing parts are empty."""

    folder: Path
    name: str
    recipe: dict[str, Any]
    recipe_text: str
    pretext_tasks: dict[str, PretextTask]  # by algorithm
    records: list[Record]  # of metrics.jsonl
    evaluations: dict[str, dict[str, Any]]
    warnings: list[Record]  # of watch.jsonl

    def setting(self, *keys: str) -> Any:
        """Return the recipe's value under ``keys``; None if any of them is missing."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def algorithms(self) -> list[str]:
        """Names of the recipe's algorithms, in its order."""
        return [str(name) for name in self.setting("algorithms") or {}]

    def column(self, key: str) -> list[float]:
        """Return the numbers logged under a key."""
        return [record[key] for record in self.records if is_number(record.get(key))]


def read_run(folder: str | Path) -> Run:
    """Read a run folder on this machine; what is missing or invalid is a ``UserError``."""
    if is_remote(str(folder)):
        raise UserError(
            f"{folder} is in a bucket, but curves are read from folders on this machine; copy it "
            f"first, such as: aws s3 sync {folder} runs/…"
        )
    folder = Path(folder)
    if not folder.is_dir():
        state = "is no folder" if folder.exists() else "does not exist"
        raise UserError(
            f"run folder {folder} {state}; give the folder that python -m pospre.train made, "
            "such as runs/droppos_vits16"
        )
    metrics, watch, made_of = (folder / f for f in ("metrics.jsonl", "watch.jsonl", "recipe.yaml"))
    if not metrics.is_file():
        raise UserError(
            f"{folder} has no metrics.jsonl, so it is not a run folder; give a folder made by "
            "python -m pospre.train"
        )
    recipe = read_mapping(made_of) if made_of.is_file() else {}
    path = folder / PRETEXT_TASKS
    try:
        tasks = from_json(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is invalid ({error}); delete it to continue without it") from error
    return Run(
        folder=folder,
        name=str(recipe.get("run_name") or folder.resolve().name),
        recipe=recipe,
        recipe_text=made_of.read_text(encoding="utf-8") if recipe else "",
        pretext_tasks=tasks,
        records=_read_lines(metrics),
        evaluations=read_documents(folder),
        warnings=_read_lines(watch) if watch.is_file() else [],
    )


def _read_lines(path: Path) -> list[Record]:
    """Parse one object per line; a running training may have written half of the last line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or not is_number(record.get("step")):
                raise ValueError("not an object with a numeric 'step'")
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(
                f"{path}, line {number} is invalid ({error}); delete this line to continue"
            ) from error
        records.append(record)
    return records


class GridCell(BaseModel):
    """Position accuracy at one pair of mask ratios."""

    mask_ratio: float
    position_mask_ratio: float
    accuracy: float
    initial_accuracy: float | None
    chance_excluding: float


class PositionGrid(BaseModel):
    """Results of ``position_grid``."""

    cells: list[GridCell] = Field(min_length=1)
    mean: float
    initial_mean: float | None
    weighted_mean: float | None = None
    samples: int

    def ratios(self, key: str) -> list[float]:
        """Return the heat map's rows (``mask_ratio``) or columns (``position_mask_ratio``)."""
        return sorted({getattr(cell, key) for cell in self.cells})

    @property
    def guess_mean(self) -> float:
        """Mean of the cells' chance levels, among positions that are not shown."""
        return sum(cell.chance_excluding for cell in self.cells) / len(self.cells)

    def cell(self, mask_ratio: float, position_mask_ratio: float) -> GridCell | None:
        """Return the cell at this pair of ratios; None if it was not measured."""
        wanted = (mask_ratio, position_mask_ratio)
        found = (c for c in self.cells if (c.mask_ratio, c.position_mask_ratio) == wanted)
        return next(found, None)


class PatchRatio(BaseModel):
    """Position accuracy of MP3 at one mask ratio; None if no patch was predicted."""

    mask_ratio: float
    top1: float | None
    initial_top1: float | None


class PatchPosition(BaseModel):
    """Results of ``patch_position``; means are over the ratios at which patches were predicted."""

    ratios: list[PatchRatio] = Field(min_length=1)
    chance: float
    samples: int

    @property
    def mean(self) -> float | None:
        """Mean over the ratios."""
        return _mean(ratio.top1 for ratio in self.ratios)

    @property
    def initial_mean(self) -> float | None:
        """The mean for the untrained model."""
        return _mean(ratio.initial_top1 for ratio in self.ratios)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Knn(BaseModel):
    """Results of ``knn``."""

    top1: float
    standard_error: float
    initial_top1: float | None
    chance: float
    k: int
    temperature: float
    bank_samples: int
    query_samples: int
    classes: int
    leave_one_out: bool
    features: str
    left_out: int


class PictureFiles(BaseModel):
    """File names of one picture's three views."""

    index: int
    original: str
    shuffled: str
    reconstructed: str
    accuracy: float


class PositionPictures(BaseModel):
    """Results of ``position_pictures``."""

    pictures: list[PictureFiles] = Field(min_length=1)
    mask_ratio: float
    position_mask_ratio: float | None


class ViewGroup(BaseModel):
    """Strips of a group's views, and the meaning of grey and green in them."""

    name: str
    legend: str
    files: list[str]


class Views(BaseModel):
    """The views drawn by ``live.py``."""

    step: int
    groups: list[ViewGroup]


class Other(NamedTuple):
    """An evaluation without its own section."""

    figures: dict[str, str]  # single numbers, with standard errors if it gives them, and texts
    pictures: dict[str, str]  # data URIs by name


def parse_results(run: Run, name: str, kind: type[Results]) -> Results | None:
    """Check and return ``evaluation/<name>.json``; None if the run lacks this evaluation."""
    if name not in run.evaluations:
        return None
    try:
        return kind.model_validate(run.evaluations[name]["results"])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("results", *first["loc"]))
        raise UserError(
            f"{run.folder / 'evaluation' / name}.json: {key}: {first['msg']}; "
            f"run python -m pospre.evaluate {name} again"
        ) from error


def load_triples(
    run: Run, pictures: Sequence[PictureFiles]
) -> list[tuple[PictureFiles, dict[str, str]]]:
    """Return the first pictures with their views, in the best quality that fits the budget."""
    folder = run.folder / "evaluation" / "position_pictures"
    chosen = pictures[:MAX_PICTURES]
    views = ("original", "shuffled", "reconstructed")
    remedy = "run python -m pospre.evaluate position_pictures again"
    images = [[_open_picture(folder, getattr(p, view), remedy) for view in views] for p in chosen]
    for side, quality in PICTURE_SIZES:
        uris = [[_data_uri(image, side, quality) for image in row] for row in images]
        if sum(len(uri) for row in uris for uri in row) <= PICTURE_BUDGET:
            break
    return [(p, dict(zip(views, row, strict=True))) for p, row in zip(chosen, uris, strict=True)]


def load_views(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return name, legend and pictures (data URIs) of the view groups; empty: none were drawn."""
    folder = run.folder / VIEWS
    index, remedy = folder / VIEWS_INDEX, f"delete {folder}"
    if not index.is_file():
        return []
    try:
        views = Views.model_validate_json(index.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UserError(f"{index} is damaged; {remedy}") from error
    return [
        (
            f"{group.name}, step {views.step}",
            group.legend,
            [_data_uri(_open_picture(folder, name, remedy), 1100, 80) for name in group.files],
        )
        for group in views.groups
    ]


def read_other(run: Run, name: str, budget: int) -> Other:
    """Return the figures and pictures of an evaluation.

    Its pictures are shrunk to ``budget`` bytes of base64 together, and the last ones left out.
    """
    folder, results = run.folder / "evaluation" / name, run.evaluations[name]["results"]
    figures = {}
    for key, value in results.items():
        error = error_of(results, key)
        if isinstance(value, str | bool):
            figures[key] = str(value)
        elif is_number(value) and not key.endswith("_se") and key != "standard_error":
            spread = f" ± {format_value(error)}" if is_number(error) else ""
            figures[key] = format_value(value) + spread
    named = results.get("pictures")
    names = [file for file in named if isinstance(file, str)] if isinstance(named, list) else []
    remedy = f"run python -m pospre.evaluate {name} again"
    images = {file: _open_picture(folder, file, remedy) for file in names[:MAX_PICTURES]}
    pictures: dict[str, str] = {}
    for file, image in images.items():
        uris = (_data_uri(image, side, 85) for side in (1400, 1000, 700, 400))
        left = budget - sum(map(len, pictures.values()))
        fitting = next((uri for uri in uris if len(uri) <= left / 2 or len(uri) < 60_000), None)
        if fitting is not None and len(fitting) <= left:
            pictures[file] = fitting
    return Other(figures, pictures)


def _open_picture(folder: Path, name: str, remedy: str) -> Image.Image:
    path = folder / name
    if path.parent != folder:
        raise UserError(f"picture {name!r} is not a plain file name in {folder}; {remedy}")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise UserError(f"picture {path} cannot be read ({error}); {remedy}") from error


def _data_uri(image: Image.Image, side: int, quality: int) -> str:
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # 4:4:4 chroma: otherwise the edges of black, empty patches would bleed
    small.save(buffer, "JPEG", quality=quality, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
