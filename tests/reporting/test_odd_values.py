"""Run folders that others have filled: a page, a message, or a value left out; no traceback."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.reporting.compare import compare_runs, comparison_text, read_runs
from pospre.reporting.page import write_report
from tests.reporting.fabricated_run import fabricate_run


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("evaluation/knn.json", ["results", "top1"], {}),
        ("evaluation/knn.json", ["results", "standard_error"], {}),
        ("evaluation/knn.json", ["settings"], True),
        ("evaluation/knn.json", ["results"], [1]),
        ("evaluation/reconstructions.json", ["results", "error"], "1"),
        ("evaluation/reconstructions.json", ["results", "error_se"], [None]),
        ("evaluation/position_grid.json", ["results", "mean"], [None]),
        ("pretext_tasks.json", ["droppos", "evaluation"], {"a": []}),
        ("pretext_tasks.json", ["droppos"], 1),
        ("watch.jsonl", ["step"], None),
        ("watch.jsonl", ["warning"], {"a": 1}),
        ("metrics.jsonl", ["loss/total"], 10**18),
        ("metrics.jsonl", ["step"], [1]),
    ],
)
def test_odd_values_are_one_message_or_left_out(
    name: str, keys: list[str], value: Any, tmp_path: Path
) -> None:
    folder = fabricate_run(tmp_path, num_steps=2)
    other = fabricate_run(tmp_path / "other", num_steps=2)
    path = folder / name
    first, *rest = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    content = json.loads(first)
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text("\n".join([json.dumps(content), *rest, '{"step": 9}' if rest else ""]))
    for ask in (
        lambda: write_report(folder),
        lambda: comparison_text(compare_runs(read_runs([str(folder), str(other)]))),
    ):
        with contextlib.suppress(UserError):
            ask()
