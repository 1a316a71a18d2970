"""Reads a run folder: recipe, logged metrics, and the results of evaluations."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pospre.errors import UserError
from pospre.evaluation.figures import read_documents
from pospre.model.task_description import PRETEXT_TASKS, TaskDescription, from_json
from pospre.object_store import is_remote
from pospre.recipe.yaml_text import read_mapping
from pospre.reporting.plots import Record
from pospre.untrusted_json import is_number, parse_json

Results = TypeVar("Results", bound=BaseModel)


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
