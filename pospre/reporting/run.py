"""Reads a run folder: recipe, logged metrics, and the results of evaluations."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from pospre.errors import UserError
from pospre.evaluation.figures import read_documents
from pospre.model.task_description import PRETEXT_TASKS, TaskDescription, from_json
from pospre.object_store import is_remote
from pospre.recipe.yaml_text import LARGEST, parse_mapping
from pospre.reporting.plots import Record
from pospre.untrusted_file import read_inside
from pospre.untrusted_json import is_number, parse_json

MOST_WARNINGS = 500  # shown
_MOST_CELLS = 400  # of a table of position accuracies
_LARGEST_NUMBER = 1e100  # in a curve
Results = TypeVar("Results", bound=BaseModel)
Part = TypeVar("Part")
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Run:
    """One run folder; missing parts are empty."""

    folder: Path
    name: str
    recipe: dict[str, Any]
    recipe_text: str
    pretext_tasks: dict[str, TaskDescription]  # by algorithm
    records: list[Record]  # of metrics.jsonl
    evaluations: dict[str, dict[str, Any]]
    looks: list[Record]  # of evaluation/history.jsonl: results during training
    warnings: list[Record]  # of watch.jsonl
    left_out: list[str]  # damaged parts, and those beyond a limit

    def setting(self, *keys: str) -> Any:
        """Return the recipe's value under ``keys``; None if any of them is missing."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def algorithms(self) -> list[str]:
        """Names of the recipe's algorithms, in its order."""
        algorithms = self.setting("algorithms")
        return [str(name) for name in algorithms] if isinstance(algorithms, dict) else []

    def column(self, key: str) -> list[float]:
        """Return the numbers logged under a key."""
        return [record[key] for record in self.records if is_number(record.get(key))]


def read_run(folder: str | Path) -> Run:
    """Read a run folder on this machine, which another person may have filled.

    Only regular files inside the folder are read, up to a size. What is damaged is left out and
    described in ``left_out``. ``UserError``: it is no run folder.
    """
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
    if not os.path.lexists(folder / "metrics.jsonl"):
        raise UserError(
            f"{folder} has no metrics.jsonl, so it is not a run folder; give a folder made by "
            "python -m pospre.train"
        )
    left_out: list[str] = []
    part = partial(_read_part, folder, left_out)
    recipe_text, recipe = part("recipe.yaml", LARGEST, _parse_recipe) or ("", {})
    return Run(
        folder=folder,
        name=str(recipe.get("run_name") or folder.resolve().name),
        recipe=recipe,
        recipe_text=recipe_text,
        pretext_tasks=part(PRETEXT_TASKS, LARGEST, lambda content, *_: from_json(content)) or {},
        records=part("metrics.jsonl", 1 << 30, _parse_lines) or [],
        evaluations=read_documents(folder, left_out),
        looks=part("evaluation/history.jsonl", 1 << 26, _parse_lines) or [],
        warnings=(part("watch.jsonl", 1 << 24, _parse_lines) or [])[:MOST_WARNINGS],
        left_out=left_out,
    )


def _read_part(
    folder: Path, left_out: list[str], name: str, limit: int, parse: Callable[..., Part]
) -> Part | None:
    """Return what ``parse`` makes of a file; None if it is missing or, with a line, damaged."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        return parse(read_inside(folder, path, limit), path, left_out)
    except UserError as error:
        left_out.append(str(error))
    except ValueError as error:
        left_out.append(f"{path} is invalid ({error})")
    return None


def _parse_recipe(content: bytes, path: Path, left_out: list[str]) -> tuple[str, dict[str, Any]]:
    text = content.decode("utf-8")
    return text, parse_mapping(text, path)


def _parse_lines(content: bytes, path: Path, left_out: list[str]) -> list[Record]:
    """Parse one object per line; a running training may have written half of the last line."""
    lines = content.decode("utf-8", errors="replace").splitlines()
    records, wrong = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or not _is_drawable(record.get("step")):
                raise ValueError("not an object with a numeric 'step'")
        except ValueError as error:
            wrong.append((number, error))
        else:
            large = {key: None for key, v in record.items() if is_number(v) and not _is_drawable(v)}
            records.append(record | large)
    if wrong and wrong[-1][0] == len(lines):
        wrong.pop()
    if wrong:
        number, reason = wrong[0]
        left_out.append(
            f"{path}: {len(wrong)} invalid lines, the first is line {number} ({reason})"
        )
    return records


def _is_drawable(value: object) -> bool:
    """Return whether a number is far enough below the largest float to compute with it."""
    return is_number(value) and abs(value) < _LARGEST_NUMBER


class GridCell(BaseModel):
    """Position accuracy at one pair of mask ratios."""

    mask_ratio: Share
    position_mask_ratio: Share
    accuracy: Share
    initial_accuracy: Share | None
    chance_excluding: Share


class PlacedPatches(BaseModel):
    """Mean position accuracy; the difference to the untrained model is paired by image."""

    mean: Share | None
    mean_se: Share | None = None
    initial_mean: Share | None
    mean_difference: float | None = Field(default=None, ge=-1, le=1)
    mean_difference_se: Share | None = None


class PositionGrid(PlacedPatches):
    """Results of ``position_grid``."""

    cells: list[GridCell] = Field(min_length=1, max_length=_MOST_CELLS)
    mean: Share
    weighted_mean: Share | None = None
    samples: int

    @model_validator(mode="after")
    def _check_size(self) -> "PositionGrid":
        if len(self.ratios("mask_ratio")) * len(self.ratios("position_mask_ratio")) > _MOST_CELLS:
            raise ValueError(f"the table would have more than {_MOST_CELLS} cells")
        return self

    def ratios(self, key: str) -> list[float]:
        """Return the heat map's rows (``mask_ratio``) or columns (``position_mask_ratio``)."""
        return sorted({getattr(cell, key) for cell in self.cells})

    @property
    def guess_mean(self) -> float:
        """Mean of the cells' chance levels, among positions that are not shown."""
        return sum(cell.chance_excluding for cell in self.cells) / len(self.cells)

    def cell(self, mask_ratio: float, position_mask_ratio: float) -> GridCell | None:
        """Return the cell at this pair of ratios; None if it was not measured."""
        return self._by_ratios.get((mask_ratio, position_mask_ratio))

    @cached_property
    def _by_ratios(self) -> dict[tuple[float, float], GridCell]:
        return {(cell.mask_ratio, cell.position_mask_ratio): cell for cell in self.cells[::-1]}


class PatchRatio(BaseModel):
    """Position accuracy of MP3 at one mask ratio; None if no patch was predicted."""

    mask_ratio: Share
    top1: Share | None
    initial_top1: Share | None


class PatchPosition(PlacedPatches):
    """Results of ``patch_position``; means are over the ratios at which patches were predicted."""

    ratios: list[PatchRatio] = Field(min_length=1, max_length=_MOST_CELLS)
    chance: Share
    samples: int


class Classified(BaseModel):
    """Accuracy of frozen features; the difference to the untrained model is paired by image."""

    top1: Share
    standard_error: Share
    initial_top1: Share | None
    top1_difference: float | None = Field(ge=-1, le=1)
    top1_difference_se: Share | None
    chance: Share
    bank_samples: int
    query_samples: int


class Knn(Classified):
    """Results of ``knn``."""

    k: int
    temperature: float
    classes: int
    leave_one_out: bool
    features: str
    left_out: int


CLASSIFIERS: dict[str, type[Classified]] = {
    "logistic": Classified,
    "linear": Classified,
    "knn": Knn,
}
"""Evaluations that classify pictures by frozen features."""


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


def parse_results(run: Run, name: str, kind: type[Results]) -> Results | None:
    """Check and return ``evaluation/<name>.json``; None if it is missing or, with a line, wrong."""
    if name not in run.evaluations:
        return None
    try:
        return kind.model_validate(run.evaluations[name]["results"])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("results", *first["loc"]))
        path = run.folder / "evaluation" / f"{name}.json"
        run.left_out.append(f"{path}: {key}: {first['msg']}; run that evaluation again")
        return None


def parse_classified(run: Run) -> dict[str, Classified]:
    """Return the results of the ``CLASSIFIERS`` that were measured, by name."""
    results = {name: parse_results(run, name, kind) for name, kind in CLASSIFIERS.items()}
    return {name: each for name, each in results.items() if each is not None}
