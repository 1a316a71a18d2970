"""The page's section on a run from published weights: the verdict, and how far it drifted."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from pydantic import ValidationError

from pospre.evaluation.registry import START
from pospre.evaluation.verdict import DRIFT, judge
from pospre.recipe.monitoring import Verdict
from pospre.reporting.run import Run
from pospre.untrusted_json import is_number

MEASURES = {
    "cosine": "cosine to the start",
    "centred": "… without the mean",
    "cka": "CKA",
    "procrustes": "Procrustes",
    "kept": "neighbours kept",
    "gram": "Gram",
    "rank": "rank",
    "r2": "R² of the place",
    "norm": "longest / median",
    "blur": "blur",
}
_KINDS = {"class": "class token", "patch": "patches"}
_MOST_COLUMNS = 9


class Drift(NamedTuple):
    """A table of figures: those of the start first, if they have any."""

    title: str
    header: list[str]
    rows: list[list[str]]


def sentence(run: Run) -> str:
    """Return the verdict of the run; empty if its recipe declares none."""
    try:
        verdict = Verdict.model_validate(run.setting("verdict"))
    except ValidationError:
        return ""
    return judge(verdict, str(run.setting("encoder", "weights")), run.evaluations).sentence


def drift_tables(run: Run) -> list[Drift]:
    """Return the drift at each look, and at the end for each block."""
    looks = [
        (look["step"], look["results"])
        for look in run.looks
        if look.get("name") == DRIFT and isinstance(look.get("results"), dict)
    ]
    if not looks:
        return []
    shown = looks if len(looks) <= _MOST_COLUMNS else [looks[0], *looks[1 - _MOST_COLUMNS :]]
    over = {f"step {step}": results for step, results in shown}
    rows = looks[-1][1].get("rows")
    blocks: dict[str, dict[str, Any]] = {}
    for row in islice(rows if isinstance(rows, list) else [], 200):
        if isinstance(row, dict) and is_number(row.get("layer")):
            block, kind = blocks.setdefault(f"{row['layer']:g}", {}), row.get("tokens")
            for key in MEASURES:
                block[f"{kind}_{key}"] = row.get(key)
                block[f"{START}{kind}_{key}"] = row.get(f"{START}{key}")
    tables = [_table("After the last block, over the steps", over)]
    return [*tables, *([_table("At the last look, by block", blocks)] if blocks else [])]


def _table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Drift:
    rows = []
    for kind, title_of in _KINDS.items():
        for key, name in MEASURES.items():
            for own, whose in (("", ""), (START, " of the start")):
                numbers = [column.get(f"{own}{kind}_{key}") for column in columns.values()]
                if any(map(is_number, numbers)):
                    rows.append([f"{title_of}: {name}{whose}", *_numbers(numbers)])
    return Drift(title, [*columns], rows)


def _numbers(values: Sequence[Any]) -> list[str]:
    return [f"{value:.3g}" if is_number(value) else "" for value in values]
