"""``make position-table`` at the size of a test: cells, reasons, a killed run, and the table."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pospre.evaluation.registry import figures_of
from tests.benchmarks import code_hash, position_table
from tests.benchmarks.position_report import BLANK, BLOCKS, FIGURES, OWN, PAPERS, report
from tests.benchmarks.position_table import (
    HOST_RECIPES,
    Cell,
    append,
    lacking,
    line_of,
    own_measure,
    read_lines,
    refusal,
)

SMALL = [
    "encoder.depth=4",
    "data.batch_size=4",
    "data.num_workers=1",
    "schedule.warmup=1ba",
    "trainer.max_duration=2ba",
    "trainer.save_interval=1ba",
    "evaluation.position_probe.num_samples=12",
    "evaluation.shifted_positions.mosaics=[2,4]",
    *(f"evaluation.{name}.num_bank=12" for name in ("knn", "logistic")),
    *(f"evaluation.{name}.num_samples=8" for name in ("knn", "logistic")),
    "evaluation.shifted_positions.num_samples=18",
    *(f"evaluation.{name}.k=2" for name in ("knn", "shifted_positions")),
]


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results" / "position_table.jsonl"
    monkeypatch.setattr(position_table, "LINES", path)
    return path


def test_a_cell_is_measured_once_and_again_with_other_code(
    lines: Path,
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pospre.train

    def here(module: str, *arguments: str) -> None:  # a second process would start torch once more
        assert module == "pospre.train" and pospre.train.main(list(arguments)) == 0

    data = image_folder(num_images=20, size=(40, 40))
    monkeypatch.setattr(position_table, "convert", lambda *_: (data, data))
    monkeypatch.setattr(position_table, "call", here)
    monkeypatch.setitem(BLOCKS, "A", replace(BLOCKS["A"], rows={"mae": ["learned"]}))
    given = [str(data), "--hosts", "mae", "--seeds", "0", "--runs", str(tmp_path / "runs")]
    given += ["--set", *SMALL]
    cell = Cell("learned", "mae", 0)
    append(lines, {**cell.key(), "figures": {"knn/top1": 0.9}})  # another recipe's
    lines.write_text(lines.read_text() + '{"row": "lear')
    assert position_table.main(given) == 0
    _, trained = read_lines(lines)
    wanted = {figure for figure in FIGURES if not figure.startswith("segmentation")}
    assert trained["figures"].keys() == wanted | {"position_probe/untrained", "training/ms"}
    text = capsys.readouterr().out
    assert "| mae | learned | 1 |" in text and "90.0" not in text
    assert "9 of 9 declared contrasts are not measured yet." in text
    monkeypatch.setattr(position_table, "call", None)  # nothing is done again
    assert position_table.main(given) == 0 and len(read_lines(lines)) == 2
    monkeypatch.setattr(code_hash, "_read", lambda path: (path.name, []))
    monkeypatch.setattr(position_table, "call", here)
    assert position_table.main([*given, "--table"]) == 0
    assert "Missing: learned × mae" in capsys.readouterr().out


def test_a_cell_is_known_by_what_can_change_its_figures() -> None:
    cell = Cell("learned", "mae", 0)
    key = cell.key()
    assert Cell("learned", "mae", 1).key()["recipe"] != key["recipe"]
    assert cell.key(["encoder.depth=3"])["recipe"] != key["recipe"]
    assert cell.key(["evaluation.knn.k=3", "data.path=elsewhere"]) == key
    assert Cell("LookHere", "mae", 0).key()["code"] != key["code"]  # another file


def test_a_cell_is_known_by_files_that_its_run_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = code_hash._read, set()

    def note(path: Path) -> tuple[str, list[str]]:
        names.add(path.name)
        return read(path)

    monkeypatch.setattr(code_hash, "_read", note)
    Cell("learned", "supervised", 0).key()
    assert {"supervised.py", "vit.py", "device.py", "step_trainer.py"} <= names
    assert not names & {"errors.py", "object_store.py", "droppos.py", "saver.py", "knn.py"}
    position_table.evaluation_key.__wrapped__("knn")
    assert "knn.py" in names and "logistic.py" not in names


def test_a_figure_is_known_by_its_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"row": "learned", "host": "mae", "seed": 0, "recipe": "r", "code": "c"}
    now = {"knn": position_table.evaluation_key("knn"), "logistic": "of other code"}
    figures = {"knn/top1": 0.4, "logistic/top1": 0.5, "training/ms": 3.0}
    line = line_of(key, [{**key, "measured": now, "figures": figures}])
    assert line is not None and line["figures"] == {"knn/top1": 0.4, "training/ms": 3.0}
    other = position_table.evaluation_key("knn", ("evaluation.knn.num_samples=8", "seed=3"))
    assert other not in (now["knn"], position_table.evaluation_key("knn", ("seed=3",)))
    assert lacking(line, {"knn": Path(), "logistic": Path()}) == ["logistic"]
    position_table.evaluation_key.cache_clear()
    monkeypatch.setitem(position_table.SETTINGS, "knn", ("num_bank=5",))
    assert position_table.evaluation_key("knn") != now["knn"]
    position_table.evaluation_key.cache_clear()


def test_every_row_and_host_of_a_block_has_a_recipe_that_works_or_a_reason() -> None:
    for block in BLOCKS.values():
        for host, rows in block.rows.items():
            for row in rows:
                recipe = Cell(row, host, 0).recipe()
                assert refusal(recipe) is None, (row, host)
    assert "supervised" in HOST_RECIPES


def test_what_the_table_asks_for_is_what_evaluations_measure() -> None:
    for name, _, key in (figure.partition("/") for figure in FIGURES):
        assert key in figures_of(name) or name == "shifted_positions"


def test_the_report_has_means_reasons_and_sentences() -> None:
    lines: dict[tuple[str, str, int], dict[str, Any]] = {
        (row, host, seed): {"figures": {"knn/top1": 0.4 + 0.1 * number + 0.01 * seed}}
        for number, row in enumerate(PAPERS[:3])
        for host in ("mae", "supervised")
        for seed in range(2)
    }
    lines["with jitter", "mae", 0] = {"refused": "it cannot", "figures": {}}
    text = report(["A"], lines, range(3))
    assert "kNN: sd 0.71 points (df 6" in text
    assert "| mae | learned | 2 | 40.5 ± 0.7 |" in text
    assert "with jitter × mae: it cannot" in text
    assert "Missing: learned × mae (seed 2), " in text and ", with jitter × supervised." in text
    assert "- kNN, mae and supervised: plain rotary − learned (+10.0 points" in text
    assert "7 of 9 declared contrasts are not measured yet." in text
    assert "with 4 runs a side, four of five true differences of" in text
    text = report(["A"], {key: line for key, line in lines.items() if not key[2]}, [0])
    assert "Of 2 of 9 declared contrasts nothing can be said: no row has two seeds" in text
    assert "7 of 9 declared contrasts are not measured yet." in text


def test_a_task_that_has_not_learned_leaves_its_families() -> None:
    rows: dict[str, dict[str, float]] = {  # a host has no measure of its own
        "DINOv3's rotary": {},
        "DropPos": {OWN: 0.3, BLANK: 0.2},
        "SP": {OWN: -0.1, BLANK: -0.2},
    }
    lines: dict[tuple[str, str, int], dict[str, Any]] = {
        (row, "mae", seed): {"figures": {"knn/top1": 0.4 + 0.01 * seed, **own}}
        for row, own in rows.items()
        for seed in range(2)
    }
    text = report(["B"], lines, range(2))
    assert (
        "DropPos × mae: its own measure is 30.0 ± 0.0, on blank images 20.0 ± 0.0: learned" in text
    )
    assert (
        "SP × mae: its own measure is -10.0 ± 0.0, on blank images -20.0 ± 0.0: not learned" in text
    )
    assert "kNN, mae: DropPos − DINOv3's rotary" in text and "SP − DINOv3's rotary" not in text
    assert "11 of 12 declared contrasts are not measured yet." in text
    assert "6 of 6 declared contrasts are not measured yet." in text


def test_the_own_measure_of_a_task_is_kept_with_the_last_one_on_blank_images() -> None:
    metrics = '{"metric/sp_blank_r2": -0.2}\n{"metric/sp_r2": 0.1}\n{"metric/sp_blank_r2": -0.1}\n'
    assert own_measure({"metric/sp_r2": 0.3}, metrics) == {OWN: 0.3, BLANK: -0.1}
    assert own_measure({"loss/mae": 0.3}, '{"loss/mae": 0.3}') == {}
