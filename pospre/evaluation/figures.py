"""Figures of evaluations from ``evaluation/<name>.json`` in a run folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pospre.errors import UserError
from pospre.evaluation.registry import START, UNTRAINED, evaluation_names, figures_of
from pospre.untrusted_file import read_inside
from pospre.untrusted_json import is_number, parse_json

MOST_DOCUMENTS = 200
_LARGEST = 1 << 26  # bytes of a document


@dataclass(frozen=True)
class Figure:
    """One figure of an evaluation, its standard error, and other encoders', if measured.

    These are with random weights (``untrained``), and with those that training started from.
    """

    name: str
    value: float
    error: float | None
    untrained: float | None
    start: float | None
    best: Literal["max", "min"]

    @property
    def spread(self) -> str:
        """Its standard error, to write after the value; empty if there is none."""
        return "" if self.error is None else f" ± {self.error:.2g}"


def figures_in(document: Mapping[str, Any]) -> list[Figure]:
    """Return the figures in ``run_evaluation``'s result; none for an unknown evaluation."""
    name, results = str(document.get("name")), document["results"]
    if name not in evaluation_names():
        return []
    return [
        Figure(
            name=key,
            value=results[key],
            error=error_of(results, key),
            untrained=_number(results.get(f"{UNTRAINED}{key}")),
            start=_number(results.get(f"{START}{key}")),
            best=best,
        )
        for key, best in figures_of(name).items()
        if is_number(results.get(key))
    ]


def error_of(results: Mapping[str, Any], key: str) -> float | None:
    """Return the standard error of a figure (``<name>_se``; for ``top1`` also another name)."""
    usual = results.get("standard_error") if key == "top1" else None
    return _number(results.get(f"{key}_se", usual))


def _number(value: object) -> float | None:
    return value if is_number(value) else None


def run_folder_of(checkpoint: str | Path) -> Path | None:
    """Return the local run folder that contains a checkpoint address; None if there is none."""
    path = Path(checkpoint)
    candidates = (path, *path.parents[:3])  # it may be checkpoints/best/ep1-ba4
    return next((folder for folder in candidates if (folder / "recipe.yaml").is_file()), None)


def read_documents(run_folder: Path, left_out: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results of evaluations in a run folder, by file name.

    What is invalid, and what exceeds ``MOST_DOCUMENTS``, is described in ``left_out`` instead.
    """
    files = sorted((run_folder / "evaluation").glob("*.json"))
    if len(files) > MOST_DOCUMENTS:
        left_out.append(f"{len(files) - MOST_DOCUMENTS} of {len(files)} evaluations")
    documents = {}
    for path in files[:MOST_DOCUMENTS]:
        try:
            documents[path.stem] = read_document(path, run_folder)
        except UserError as error:
            left_out.append(str(error))
    return documents


def finite(value: Any) -> Any:
    """Return plain values with None for every number that is not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_document(path: Path, run_folder: Path | None = None) -> dict[str, Any]:
    """Return the result of an evaluation; raise a ``UserError`` if the file is invalid.

    ``run_folder``: the folder in which the file must lie; default: its own.
    """
    try:
        content = parse_json(read_inside(run_folder or path.parent, path, _LARGEST))
    except ValueError as error:
        raise UserError(f"{path} is invalid ({error}); run that evaluation again") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise UserError(f"{path} has no 'results'; run that evaluation again")
    if not isinstance(content.get("settings", {}), dict):
        raise UserError(f"{path}: its 'settings' are invalid; run that evaluation again")
    return content
