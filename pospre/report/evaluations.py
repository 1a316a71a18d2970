"""Evaluation results for the page: heat map, bars and pictures."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from pospre.errors import UserError
from pospre.evaluation.figures import error_of
from pospre.report.plots import format_value
from pospre.report.run import Run
from pospre.untrusted_json import is_number

MAX_PICTURES = 24
PICTURE_BUDGET = 1_500_000  # bytes of base64 for these; half as many for other evaluations'
# pictures. With the views of a step the page stays under 3 MB
PICTURE_SIZES = ((320, 90), (256, 85), (192, 80), (128, 70))  # longest side, JPEG quality

Results = TypeVar("Results", bound=BaseModel)


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

    @property
    def mask_ratios(self) -> list[float]:
        """Rows of the heat map."""
        return sorted({cell.mask_ratio for cell in self.cells})

    @property
    def position_mask_ratios(self) -> list[float]:
        """Columns of the heat map."""
        return sorted({cell.position_mask_ratio for cell in self.cells})

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
    """Results of ``patch_position``."""

    ratios: list[PatchRatio] = Field(min_length=1)
    chance: float
    samples: int

    @property
    def mean(self) -> float | None:
        """Mean over the ratios at which patches were predicted."""
        return _mean(ratio.top1 for ratio in self.ratios)

    @property
    def initial_mean(self) -> float | None:
        """The mean for the untrained model."""
        return _mean(ratio.initial_top1 for ratio in self.ratios)


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

    @property
    def conditions(self) -> list[str]:
        """The conditions of the measurement, in words."""
        words = [
            f"k = {self.k}",
            f"temperature {self.temperature:g}",
            f"{self.bank_samples} pictures in the bank",
            f"{self.query_samples} pictures classified",
            f"{self.classes} classes",
            f"{self.features} features",
        ]
        if self.leave_one_out:
            words.append("each picture excluded from its own bank")
        if self.left_out:
            words.append(f"{self.left_out} pictures left out: the only ones of their class")
        return words


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


@dataclass(frozen=True)
class Other:
    """An evaluation without its own section.

    Attributes:
        figures: its single numbers, with standard errors if it gives them, and its texts.
        pictures: its pictures, as data URIs by name.
    """

    figures: dict[str, str]
    pictures: dict[str, str]


@dataclass(frozen=True)
class Triple:
    """A picture for the page: three data URIs and the share of correctly placed patches."""

    index: int
    accuracy: float
    views: list[tuple[str, str]]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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


def load_triples(folder: Path, pictures: Sequence[PictureFiles]) -> list[Triple]:
    """Embed the pictures in ``folder`` as JPEG, in the best quality that fits the budget."""
    chosen = pictures[:MAX_PICTURES]
    views = ("original", "shuffled", "reconstructed")
    remedy = "run python -m pospre.evaluate position_pictures again"
    images = [[_open_picture(folder, getattr(p, view), remedy) for view in views] for p in chosen]
    for side, quality in PICTURE_SIZES:
        uris = [[_data_uri(image, side, quality) for image in row] for row in images]
        if sum(len(uri) for row in uris for uri in row) <= PICTURE_BUDGET:
            break
    return [
        Triple(picture.index, picture.accuracy, list(zip(views, row, strict=True)))
        for picture, row in zip(chosen, uris, strict=True)
    ]


def load_views(folder: Path) -> list[tuple[str, str, list[str]]]:
    """Return name, legend and pictures (data URIs) of the view groups; empty for old runs."""
    if not (folder / "views.json").is_file():
        return []
    try:
        views = Views.model_validate_json((folder / "views.json").read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UserError(f"{folder / 'views.json'} is damaged; delete {folder}") from error
    remedy = f"delete {folder}"
    return [
        (
            f"{group.name}, step {views.step}",
            group.legend,
            [_data_uri(_open_picture(folder, name, remedy), 1100, 80) for name in group.files],
        )
        for group in views.groups
    ]


def read_other(results: dict[str, Any], folder: Path, budget: int) -> Other:
    """Return the figures and pictures of an evaluation.

    Args:
        results: numbers, texts and errors (see ``error_of``); ``pictures`` may name files.
        folder: of its pictures.
        budget: bytes of base64 for all pictures; they are shrunk, and the last ones left out.
    """
    figures = {}
    for key, value in results.items():
        error = error_of(results, key)
        if isinstance(value, str | bool):
            figures[key] = str(value)
        elif is_number(value) and not key.endswith("_se") and key != "standard_error":
            spread = f" ± {format_value(error)}" if is_number(error) else ""
            figures[key] = format_value(value) + spread
    named = results.get("pictures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    remedy = f"run python -m pospre.evaluate {folder.name} again"
    images = {name: _open_picture(folder, name, remedy) for name in names[:MAX_PICTURES]}
    pictures: dict[str, str] = {}
    for name, image in images.items():
        uris = (_data_uri(image, side, 85) for side in (1400, 1000, 700, 400))
        left = budget - sum(map(len, pictures.values()))
        fitting = next((uri for uri in uris if len(uri) <= left / 2 or len(uri) < 60_000), None)
        if fitting is not None and len(fitting) <= left:
            pictures[name] = fitting
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
