"""The best checkpoint: what is kept, and that it is found again wherever a kill came."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.evaluation.best_checkpoint import BestCheckpoint
from pospre.evaluation.recipe_evaluations import best_figure
from pospre.recipe.recipe import Recipe, recipe_from_dict
from pospre.run.checkpoints.folders import NOTE
from tests.evaluation.checkpoints import tiny_recipe

FIGURE = "evaluation/knn/top1"


class Folder:
    """A run's folder with figures and checkpoints as training writes them."""

    def __init__(self, path: Path, better: Any = "max") -> None:
        self.metrics, self.checkpoints = path / "metrics.jsonl", path / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        self.best = BestCheckpoint(self.metrics, self.checkpoints, FIGURE, better)

    def measure(self, step: int, figure: float) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "loss/total": 1.0}) + "\n")
            file.write(json.dumps({"step": step, FIGURE: figure}) + "\n")

    def save(self, step: int) -> Path:
        path = self.checkpoints / f"ep0-ba{step}"
        path.mkdir()
        (path / "state.json").write_text(str(step))
        (path / "manifest.json").write_text("{}")
        return path

    def drop(self, step: int) -> None:
        shutil.rmtree(self.checkpoints / f"ep0-ba{step}")

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.best.folder.glob("*ba*"))


def test_the_best_stays_when_the_last_ones_go(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step, figure in ((3, 0.2), (6, 0.5), (9, 0.5), (12, 0.4)):
        folder.measure(step, figure)
        assert folder.best.is_best(step) == (step < 9)  # of two equal ones the first
        folder.best.settle(folder.save(step))
        if step > 3:
            folder.drop(step - 3)
    assert folder.kept() == ["ep0-ba6"]
    assert (folder.best.folder / "ep0-ba6" / "state.json").read_text() == "6"
    note = json.loads((folder.best.folder / NOTE).read_text())
    assert note == {"step": 6, "figure": FIGURE, "value": 0.5, "checkpoint": "ep0-ba6"}
    folder.best.forget()
    assert not list(folder.best.folder.iterdir()) and folder.checkpoints.exists()


def test_the_smallest_may_be_the_best(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "min")
    for step, figure in ((3, 0.2), (6, 0.1), (9, 0.3)):
        folder.measure(step, figure)
        folder.best.settle(folder.save(step))
    assert folder.kept() == ["ep0-ba6"]


def test_killed_anywhere_it_is_found_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.measure(3, 0.2)
    folder.best.settle(folder.save(3))
    folder.measure(6, 0.5)  # killed here: nothing of step 6 is saved
    folder.best.settle()
    assert folder.kept() == ["ep0-ba3"] and folder.best.is_best(6)
    folder.save(6)  # killed after the save
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "evaluation/kn')  # and in the middle of a line
    folder.best.settle()
    assert folder.kept() == ["ep0-ba6"]
    # killed before the earlier one was removed, or with half a copy there
    shutil.copytree(folder.checkpoints / "ep0-ba3", folder.best.folder / "ep0-ba3")
    (folder.best.folder / "ep0-ba9.partial").mkdir()
    folder.drop(3)
    folder.best.settle()
    assert folder.kept()[0] == "ep0-ba6"
    assert json.loads((folder.best.folder / NOTE).read_text())["step"] == 6


def test_without_hard_links_it_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*paths: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    folder = Folder(tmp_path)
    folder.measure(3, 0.2)
    folder.best.settle(folder.save(3))
    assert (folder.best.folder / "ep0-ba3" / "state.json").read_text() == "3"


def test_a_step_without_a_figure_is_never_the_best(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.best.settle(folder.save(3))
    assert not folder.best.folder.exists() and not folder.best.is_best(3)


def recipe(keep_best: str, evaluation: dict[str, Any]) -> Recipe:
    plain = tiny_recipe(Path("runs"), "mae").dump()
    plain["trainer"]["keep_best"] = keep_best
    return recipe_from_dict({**plain, "evaluation": evaluation})


def test_which_figure_decides_is_said_as_metrics_call_it() -> None:
    often = {"knn": {"every": "1ep"}}
    assert best_figure(recipe("knn/top1", often)) == (FIGURE, "max")
    assert best_figure(recipe(FIGURE, often)) == (FIGURE, "max")


@pytest.mark.parametrize(
    ("keep_best", "evaluation", "words"),
    [
        ("knn/top1", {}, "evaluation.knn.every: 10ep"),
        ("knn/top1", {"knn": {}}, "evaluation.knn.every: 10ep"),
        ("knn/top2", {"knn": {"every": "1ep"}}, "Did you mean 'knn/top1'"),
        ("logistic/top1", {"knn": {"every": "1ep"}, "logistic": {}}, "not measured during train"),
        ("loss/total", {"knn": {"every": "1ep"}}, "Known: knn/top1"),
    ],
)
def test_a_figure_that_is_not_measured_is_refused(
    keep_best: str, evaluation: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        best_figure(recipe(keep_best, evaluation))
    assert f"trainer.keep_best = {keep_best}" in str(refused.value)
