"""``make evaluation-table`` names every evaluation, with settings that it has, and its figures."""

import json
from pathlib import Path

import pytest

from pospre.evaluation.registry import check_settings, evaluation_names, figures_of
from pospre.model_arguments import parse_settings
from tests.benchmarks import evaluation_table
from tests.benchmarks.evaluation_table import EPOCHS, RECIPES, ROWS, command, figure, table


def test_the_table_has_every_evaluation_and_only_settings_that_it_has() -> None:
    assert sorted(ROWS) == evaluation_names()
    for name, row in ROWS.items():
        settings = [word for word in command(name, Path("run"), Path("data")) if "=" in word]
        check_settings(name, parse_settings(settings))
        assert row.figure in (None, "accuracy", *figures_of(name))
        assert row.run in EPOCHS and (RECIPES / f"{row.run}.yaml").is_file()


def test_what_is_measured_stands_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def call(module: str, *arguments: str) -> None:
        calls.append(module)
        if module == "pospre.evaluate":
            path = Path(arguments[2]) / "evaluation" / "knn.json"
            path.parent.mkdir(parents=True)
            top1 = 0.25 if path.parts[-3].endswith("_untrained") else 0.5
            path.write_text(json.dumps({"results": {"top1": top1, "standard_error": 0.01}}))

    monkeypatch.setattr(evaluation_table, "LINES", tmp_path / "lines.jsonl")
    monkeypatch.setattr(evaluation_table, "call", call)
    given = ["--names", "knn", "--work", "w", "--runs", str(tmp_path)]
    assert evaluation_table.main(given) == 0
    assert calls == ["data_prep.scenes"] * 3 + ["pospre.train"] * 2 + ["pospre.evaluate"] * 2
    assert "| top1 | 0.25 ± 0.01 | 0.5 ± 0.01 | scikit-learn" in capsys.readouterr().out
    assert evaluation_table.main(given) == 0 and len(calls) == 7  # nothing is done again


def test_figures_of_pictures_are_means_and_gaps_are_said() -> None:
    assert figure({"pictures": [{"accuracy": 0.5}, {"accuracy": 1.0}]}, "accuracy") == (0.75, None)
    assert figure({"JF": 0.5, "JF_se": 0.1, "standard_error": 9}, "JF") == (0.5, 0.1)
    assert table({}).count("not measured") == len(ROWS)
