"""What a recipe's ``evaluation`` section asks for, once training is done."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.evaluation import recipe_evaluations
from pospre.evaluation.registry import check_settings
from pospre.recipe.recipe import recipe_from_dict
from pospre.run.checkpoints.reading import Checkpoint
from tests.conftest import write_images
from tests.evaluation.checkpoints import tiny_recipe
from tests.evaluation.dense.pictures import voc_folder
from tests.refusals import refuses


def test_the_newest_whole_checkpoint_is_read_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"knn": {"k": 5}, "logistic": {"weights": "teacher"}, "accuracy": {}}
    recipe = recipe_from_dict({**tiny_recipe(tmp_path, "mae").dump(), "evaluation": asked})
    done = tmp_path / "tiny" / "evaluation" / "accuracy.json"
    done.parent.mkdir(parents=True)
    settings = check_settings("accuracy", {}).values()
    made = {"step": 4, "data": "unused", "weights": "student", "settings": settings}
    done.write_text(json.dumps(made))
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


CLASSES = {"supervised": {"num_classes": 5}}


@pytest.mark.parametrize(
    ("name", "figure", "methods", "why"),
    [
        ("detection", "mask_AP", "mae", "objects of .* have no masks; add them, or use detection"),
        ("accuracy", "top5", CLASSES, "of 5 classes .* among five; use accuracy/top1"),
        ("drift", "class_cosine", "mae", "the encoder has no class token; use drift/patch_cosine"),
    ],
)
def test_a_best_figure_that_will_be_none_is_refused_before_training(
    name: str, figure: str, methods: Any, why: str, tmp_path: Path
) -> None:
    made = tiny_recipe(tmp_path, methods, class_token=name != "drift").dump()
    images = write_images(tmp_path / "images", 20, tuple("abcde"))
    boxes = voc_folder(tmp_path / "boxes", {"train": 2, "val": 2})
    made["data"]["path"] = str(images)
    data = str(boxes if name == "detection" else images)
    made["evaluation"] = {name: {"every": "1ep", "data": data}}
    made["trainer"]["keep_best"] = f"{name}/{figure}"
    words = f"recipe: trainer.keep_best = {name}/{figure}: {why}"
    refuses(words, lambda: recipe_evaluations.check_evaluations(recipe_from_dict(made)), tmp_path)
