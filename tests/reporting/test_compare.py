"""Runs side by side: means, differences with errors, recipes; what cannot be compared is named."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pospre.compare import main
from pospre.reporting.compare import compare_runs, read_runs
from pospre.reporting.plots import draw_chart
from tests.refusals import fails
from tests.reporting.fabricated_run import fabricate_run, knn, write_evaluation


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of other length, rate and figures."""
    first = fabricate_run(tmp_path / "a", name="slow", num_steps=200)
    second = fabricate_run(tmp_path / "b", name="fast", num_steps=120)
    recipe = (second / "recipe.yaml").read_text()
    recipe = recipe.replace("base_lr: 1.5e-4", "base_lr: 1.5e-3").replace("seed: 0", "seed: 7")
    (second / "recipe.yaml").write_text(recipe)
    write_evaluation(first, "knn", {**knn(), "top1": 0.70, "top1_se": 0.03})
    write_evaluation(second, "knn", {**knn(), "top1": 0.79, "standard_error": 0.04})
    shutil.rmtree(second / "evaluation" / "position_pictures")
    (second / "evaluation" / "position_grid.json").unlink()
    return first, second


def test_curves_are_means_up_to_the_last_common_step(pair: tuple[Path, Path]) -> None:
    comparison = compare_runs(read_runs([str(folder) for folder in pair]))
    assert comparison.names == ["slow", "fast"] and comparison.step == 120
    rows = {label: cells for label, *cells in comparison.curves}
    assert rows["steps"] == ["200", "120"]
    for place, folder in enumerate(pair):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        expected = np.mean([line["loss/mae"] for line in lines[108:120]])
        assert float(rows["loss/mae"][place]) == pytest.approx(expected, rel=1e-3)


def test_differences_have_the_error_of_both(pair: tuple[Path, Path]) -> None:
    comparison = compare_runs(read_runs([str(folder) for folder in pair]))
    rows = {label: cells for label, *cells in comparison.figures}
    assert rows["knn top1"] == ["0.7 ± 0.03", "0.79 ± 0.04", "+0.09 ± 0.05"]  # √(.03² + .04²)
    assert rows["position_grid mean"][1:] == ["–", "–"]
    write_evaluation(pair[1], "knn", {**knn(), "top1": 0.81, "top1_se": 0.04})
    again = compare_runs(read_runs([str(folder) for folder in pair]))
    assert {row[0]: row[-1] for row in again.figures}["knn top1"] == "+0.11 ± 0.05 *"


def test_recipes_by_dotted_keys(pair: tuple[Path, Path]) -> None:
    rows = compare_runs(read_runs([str(folder) for folder in pair])).recipe
    assert rows == [["seed", "0", "7"], ["optimizer.base_lr", "0.00015", "0.0015"]]


def test_the_command_prints_tables_and_notes(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((pair[1] / "evaluation" / "knn.json").read_text())
    document["results"]["chance"] = 0.0625
    (pair[1] / "evaluation" / "knn.json").write_text(json.dumps({**document, "data": "other"}))
    assert main([str(folder) for folder in pair]) == 0
    text = capsys.readouterr().out
    assert "up to step 120" in text and "knn: data differ: data/scenes | other" in text
    assert "knn: chance differ: 0.0625 | " in text
    assert re.search(r"optimizer\.base_lr +0\.00015 +0\.0015", text)
    third = shutil.copytree(pair[0], pair[0].parent / "twin")
    assert main([str(folder) for folder in (*pair, third)]) == 0
    text = capsys.readouterr().out
    assert str(third) in text and "fast" in text  # two runs of one name go by their folders
    assert "+0.09" not in text


class _Page(HTMLParser):
    """Collects what a page would fetch, and its paths by class."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.lines: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.fetched += [given[key] or "" for key in ("src", "href") if key in given]
        if tag == "path" and (given.get("class") or "").startswith("line"):
            self.lines.append(given["class"] or "")


def test_the_page_is_whole_and_fetches_nothing(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (pair[0] / "recipe.yaml").read_text()
    (pair[0] / "recipe.yaml").write_text(recipe.replace("path: data/scenes", 'path: "<b>x</b>"'))
    out = tmp_path / "compare.html"
    assert main([*(str(folder) for folder in pair), "--output", str(out)]) == 0
    html = out.read_text(encoding="utf-8")
    page = _Page()
    page.feed(html)
    assert page.fetched == ["data:,"] and len(html) < 500_000
    charts = html.count('<figure class="chart">')
    assert page.lines == ["line run-0", "line run-1"] * charts and charts >= 5
    assert "&lt;b&gt;x&lt;/b&gt;" in html and "<b>x</b>" not in html
    assert "Loss · mae" in html and "+0.09 ± 0.05" in html and "prefers-color-scheme" in html


def test_one_axis_holds_all_curves(pair: tuple[Path, Path]) -> None:
    records = [run.records for run in read_runs([*map(str, pair)])]
    chart = draw_chart(records, "loss/mae", title="Loss")
    assert chart is not None
    ends = [line.raw_path.split("L")[-1].split()[0] for line in chart.lines]
    assert [float(end) for end in ends] == pytest.approx([1000, 1000 * 120 / 200], abs=0.1)


def test_mistakes_are_one_line(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(*arguments: object) -> str:
        message = fails(main, capsys, *arguments)
        assert message.count("\n") == 1
        return message

    first, second = pair
    (tmp_path / "empty").mkdir()
    assert "does not exist" in says(first, tmp_path / "none")
    assert "no metrics.jsonl" in says(first, tmp_path / "empty")
    assert "are the same run" in says(first, first / ".." / first.name)
    assert "is one run" in says(first)
    assert "aws s3 sync s3://bucket/mae" in says(first, "s3://bucket/mae")
    assert "must end in .html" in says(*pair, "--output", "page.txt")
    assert "is not a writable folder" in says(*pair, "--output", "/dev/null/page.html")
    assert "--reference is for one run" in says(*pair, "--reference", "x.json")
    (second / "metrics.jsonl").write_text("")
    assert main([str(first), str(second)]) == 0  # what they measured is compared all the same
    assert "steps" in capsys.readouterr().out
    shutil.rmtree(second / "evaluation")
    (second / "metrics.jsonl").write_text('{"step": 1, "loss/other": 1.0}\n')
    message = says(*pair)
    assert "slow and fast have nothing in common" in message and "loss/droppos" in message


def test_values_that_are_not_finite_are_said(pair: tuple[Path, Path]) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss/mae": None} for step in range(1, 121)]
    (pair[1] / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = compare_runs(read_runs([*map(str, pair)])).curves
    assert rows[-1][2] == "not finite" and not math.isnan(float(rows[-1][1]))
