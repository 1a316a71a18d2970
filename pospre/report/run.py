"""Reads a run folder: recipe, logged metrics and evaluations, as plain Python values."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pospre.errors import UserError
from pospre.evaluation.figures import read_documents
from pospre.model.pretext_task import PRETEXT_TASKS, PretextTask, from_json
from pospre.object_store import is_remote
from pospre.recipe.yaml_text import read_mapping
from pospre.untrusted_json import is_number, parse_json

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run folder; missing parts are empty.

    ``records`` are the lines of ``metrics.jsonl``, ``warnings`` those of ``watch.jsonl``, and
    ``pretext_tasks`` the tasks of its algorithms by name.
    """

    folder: Path
    name: str
    recipe: dict[str, Any]
    recipe_text: str
    pretext_tasks: dict[str, PretextTask]
    records: list[Record]
    evaluations: dict[str, dict[str, Any]]
    warnings: list[Record]

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


def read_run(folder: str | Path) -> Run:
    """Read a run folder on this machine.

    Raises:
        UserError: it is missing or in a bucket, has no logs, or has an invalid file.
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
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(
            f"{folder} has no metrics.jsonl, so it is not a run folder; give a folder made by "
            "python -m pospre.train"
        )
    made_of = folder / "recipe.yaml"
    recipe = read_mapping(made_of) if made_of.is_file() else {}
    text = made_of.read_text(encoding="utf-8") if recipe else ""
    records, watch = _read_lines(metrics), folder / "watch.jsonl"
    warnings = _read_lines(watch) if watch.is_file() else []
    name = str(recipe.get("run_name") or folder.resolve().name)
    path = folder / PRETEXT_TASKS
    tasks = _read_pretext_tasks(path) if path.is_file() else {}
    return Run(folder, name, recipe, text, tasks, records, read_documents(folder), warnings)


def _read_pretext_tasks(path: Path) -> dict[str, PretextTask]:
    try:
        return from_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is invalid ({error}); delete it to continue without it") from error


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


def column(records: Sequence[Record], key: str) -> list[float]:
    """Return the numbers logged under a key."""
    return [record[key] for record in records if is_number(record.get(key))]
