"""What a recipe's ``evaluation`` section asks for, once training is done."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.evaluation import recipe_evaluations
from pospre.recipe.recipe import recipe_from_dict
from pospre.run.checkpoints.reading import Checkpoint
from tests.evaluation.checkpoints import tiny_recipe


def test_the_newest_whole_checkpoint_is_read_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"knn": {"k": 5}, "logistic": {"weights": "teacher"}, "accuracy": {}}
    recipe = recipe_from_dict({**tiny_recipe(tmp_path, "mae").dump(), "evaluation": asked})
    done = tmp_path / "tiny" / "evaluation" / "accuracy.json"
    done.parent.mkdir(parents=True)
    done.write_text('{"step": 4}')
    stale = done.with_name("logistic.json")  # of before the training went on
    stale.write_text('{"step": 2}')
    reads, measured = [], []
    state = {"model": {}, "optimizers": {}, "timestamp": {"Timestamp": {"batch": 4}}}

    def open_newest(folders: list[str]) -> Checkpoint:
        reads.append(folders)
        return Checkpoint("ep1-ba4", "", {"state": state})

    def run_evaluation(name: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        measured.append((name, *arguments, options["address"], options["weights"]))
        if name == "knn":
            raise UserError("no labels")
        return {"results": {"top1": 0.5}}

    monkeypatch.setattr(recipe_evaluations, "open_newest", open_newest)
    newest = SimpleNamespace(batch=4)
    monkeypatch.setattr(recipe_evaluations, "checkpoints_of", lambda recipe: [newest])
    monkeypatch.setattr(
        recipe_evaluations, "model_of", lambda checkpoint, weights: (weights, recipe)
    )
    monkeypatch.setattr(recipe_evaluations, "run_evaluation", run_evaluation)
    (failure,) = recipe_evaluations.run_evaluations(recipe, again=False)
    assert str(failure) == "no labels" and "top1      0.5" in capsys.readouterr().out
    assert reads == [[str(tmp_path / "tiny" / "checkpoints")]]
    knn, logistic = measured
    assert knn[1:5] == ("student", recipe, "unused", {"k": 5})
    assert logistic[:4] == ("logistic", "teacher", recipe, "unused")
    assert logistic[-2:] == ("ep1-ba4", "teacher")
