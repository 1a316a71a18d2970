"""``make position-table`` at the size of a test: cells, reasons, a killed run, and the table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pospre.evaluation.registry import figures_of
from tests.benchmarks import position_table
from tests.benchmarks.position_table import (
    Cell,
    append,
    differences,
    read_lines,
    refusal,
    run,
    table,
)
from tests.evaluation.dense.pictures import voc_folder

SMALL = [
    "encoder.depth=4",
    "data.batch_size=4",
    "data.num_workers=1",
    "schedule.warmup=1ba",
    "trainer.save_interval=1ba",
    "evaluation.position_probe.num_samples=12",
    "evaluation.knn.num_bank=8",
    "evaluation.knn.num_samples=8",
    "evaluation.knn.k=2",
    "evaluation.logistic.num_bank=12",
    "evaluation.logistic.num_samples=8",
    "evaluation.detection.size=32",
    "evaluation.detection.channels=8",
    "evaluation.detection.iterations=1",
]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results" / "position_table.jsonl"
    monkeypatch.setattr(position_table, "LINES", path)
    return path


def test_a_cell_is_measured_once_and_a_cut_line_again(
    lines: Path,
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pospre.train

    def here(module: str, *arguments: str) -> None:  # a second process would start torch once more
        assert module == "pospre.train" and pospre.train.main(list(arguments)) == 0

    data = image_folder(num_images=16, size=(40, 40))
    monkeypatch.setattr(position_table, "convert", lambda *_: (data, data))
    monkeypatch.setattr(position_table, "call", here)
    given = [str(data), "--methods", "DropPos", "--positions", "sin-cos", "none"]
    given += ["--duration", "2ba", "--runs", str(tmp_path / "runs"), "--set", *SMALL]
    other = {"method": "DropPos", "positions": "sin-cos", "seed": 0, "duration": "2ba"}
    append(lines, {**other, "set": []})  # another recipe's: this cell is not done by that
    lines.write_text(lines.read_text()[:-1] + '\n{"method": "Dr')
    assert position_table.main(given) == 0
    _, trained, refused = read_lines(lines)
    assert set(trained["figures"]) >= {"position_probe/top1", "knn/top1", "logistic/top1"}
    assert trained["figures"]["position_probe/chance"] == 1 / 64
    assert 0 <= trained["figures"]["logistic/initial"] <= 1
    assert "none to change" in refused["refused"] and "figures" not in refused
    text = capsys.readouterr().out
    assert "| sin-cos |" in text and f"- DropPos: {refused['refused']}" in text
    monkeypatch.setattr(position_table, "call", None)  # nothing is done again, in any precision
    assert position_table.main([*given, "trainer.precision=amp_bf16"]) == 0
    assert len(read_lines(lines)) == 3
    given += ["--bccd", str(voc_folder(tmp_path / "bccd", {"train": 4, "val": 2}))]
    trainings = sorted(tmp_path.glob("runs/**/checkpoints/*"))
    times = [path.stat().st_mtime_ns for path in trainings]
    monkeypatch.setattr(position_table, "call", here)
    assert position_table.main(given) == 0  # what data are given for is measured later, alone
    assert trainings and times == [path.stat().st_mtime_ns for path in trainings]
    assert set(read_lines(lines)[-1]["figures"]) == {"detection/AP50"}
    text = capsys.readouterr().out
    assert "| BCCD AP50 % |" in text and "| kNN % |" in text
    monkeypatch.setattr(position_table, "call", None)
    assert position_table.main(given) == 0 and len(read_lines(lines)) == 4


@pytest.mark.parametrize(
    ("method", "positions", "wanted"),
    [
        ("MP3", "sin-cos", None),
        ("MP3", "crop field", None),
        ("DropPos", "none", "positions"),
        ("DropPos", "relative", None),
        ("StoP", "relative", None),
        ("MAE", "learned", None),
        ("DINOv2", "crop field", None),
        ("Intertwined", "sin-cos", None),
        ("LUT", "none", None),
        ("MP3", "none", None),
        ("DINOv2", "relative", "supports only the grid of"),
    ],
)
def test_what_does_not_combine_says_why(method: str, positions: str, wanted: str | None) -> None:
    recipe = Cell(method, positions, 0, "2ep").recipe()
    assert ("crop_field" in recipe["algorithms"]) == (positions == "crop field")
    reason = refusal(recipe)
    assert (reason is None) if wanted is None else (reason is not None and wanted in reason)


def test_algorithms_are_trained_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_table, "call", lambda *_: None)  # trains nothing
    with pytest.raises(FileNotFoundError):
        run(
            Cell("DropPos", "crop field", 0, "2ba"),
            tmp_path,
            {"knn": tmp_path},
            tmp_path,
            ["evaluation.detection.size=32"],
        )
    (path,) = tmp_path.glob("*.yaml")
    assert list(yaml.safe_load(path.read_text())["algorithms"]) == ["droppos", "crop_field"]
    assert "detection" not in path.read_text()  # settings of what is not measured are left out


def values(**cells: list[float]) -> dict[tuple[str, str], list[float]]:
    return {(key, "MAE"): found for key, found in cells.items()}


def test_what_the_table_asks_for_is_what_evaluations_measure() -> None:
    for name, _, key in (figure.partition("/") for figure in position_table.FIGURES):
        assert key in figures_of(name)


def test_only_differences_beyond_two_deviations_are_named() -> None:
    clear = values(learned=[0.5, 0.52, 0.54], none=[0.3, 0.31, 0.32], relative=[0.52, 0.5, 0.51])
    assert differences(clear, {}) == (
        "Beyond two standard deviations: MAE (learned) > MAE (none) by 21.0; "
        "MAE (relative) > MAE (none) by 20.0."
    )
    assert differences(values(none=[0.1, 0.5], learned=[0.2, 0.7]), {}).startswith("No difference")
    assert "no deviation is known" in differences(values(none=[0.1], learned=[0.9]), {})
    chances = values(learned=[1 / 64], none=[1 / 16], relative=[1 / 64])
    assert "none" not in differences(clear, chances)


def test_the_table_has_means_deviations_and_untrained_figures() -> None:
    lines: list[dict[str, Any]] = [
        {
            "method": "MAE",
            "positions": "learned",
            "seed": seed,
            "duration": "2ep",
            "figures": {"knn/top1": 0.4 + 0.02 * seed, "knn/initial": 0.3},
        }
        for seed in range(3)
    ]
    lines.append({**lines[0], "method": "MP3", "figures": None, "refused": "it predicts them"})
    lines[-1].pop("figures")
    lines.append({**lines[0], "duration": "1ba", "figures": {"knn/top1": 0.9}})
    text = table(json.loads(json.dumps(lines)), "2ep")
    assert "| learned | 42.0 ± 2.0 |  | – |" in text and "90.0" not in text
    assert "Untrained: 30.0 to 30.0" in text and "- MP3: it predicts them" in text
