"""A recipe whose algorithm is a class of another package, in every command."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

import pospre
from pospre import compare, evaluate, export, loader_report, plan, report, train, trust
from pospre.arguments import check_arguments
from pospre.errors import UserError, run_command
from pospre.evaluation.run import check_evaluation
from pospre.exporting.target import card_of
from pospre.model.algorithm import algorithm_class
from pospre.nn.build import build_encoder
from pospre.recipe.recipe import load_recipe, recipe_from_dict
from pospre.training.build import build_algorithms
from pospre.training.resolve import resolve
from tests.evaluation.checkpoints import measured, save_checkpoint
from tests.nn.positions.own_scheme import forget
from tests.refusals import refuses
from tests.training.tiny_runs import Run, metrics

NAME = "mylab.loca:LOCA"
LOCA = '''\
"""LOCA in short: every patch is asked for its place, of which the encoder is not told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.objective import Objective
from pospre.model.uses import Pass, Uses


class Places(Objective):
    def __init__(self, encoder, options: "LOCA") -> None:
        super().__init__()
        self.prefix, self.weight = encoder.num_prefix_tokens, options.weight
        self.smoothing = options.smoothing
        self.head = nn.Linear(encoder.embed_dim, encoder.num_patches)

    def forward(self, passes, batch) -> dict[str, Tensor]:
        return {"logits": self.head(passes["student"][:, self.prefix :]).float()}

    def loss(self, outputs, batch) -> Tensor:
        logits = outputs["logits"]
        places = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
        return F.cross_entropy(logits.mT, places, label_smoothing=self.smoothing)

    def metrics(self, outputs, batch) -> dict[str, Tensor]:
        return {"spread": outputs["logits"].std()}


@dataclass(kw_only=True, eq=False)
class LOCA(PretrainAlgorithm):
    """Places of patches."""

    objective = Places

    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight: float = 1.0

    def uses(self, encoder):
        return Uses(passes={"student": Pass()}, predicts="places")


class Sketch(PretrainAlgorithm):
    def __init__(self, cells=4):
        """Without types: anything is taken."""


helper = print
'''


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the package ``mylab`` in the current directory, as Python finds it under ``-m``."""
    package = tmp_path / "mylab"
    package.mkdir()
    (package / "loca.py").write_text(LOCA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trust, "_trusted", {"mylab", "yourlab"})
    yield package
    forget()


@pytest.fixture
def recipe(tiny: Path, mylab: Path) -> Path:
    """Return the tiny recipe with LOCA alone."""
    data = yaml.safe_load(tiny.read_text())
    data["algorithms"] = {NAME: {"smoothing": 0.1}}
    data["encoder"]["positions"] = "none"
    data["trainer"]["max_duration"] = "4ba"
    data["schedule"] = {"warmup": "1ba", "length": "4ba"}
    tiny.write_text(yaml.safe_dump(data))
    return tiny


def test_a_class_outside_is_trained_resumed_measured_and_exported(
    recipe: Path, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weight = f"algorithms.{NAME}.weight=2"

    def does(main: Callable[[list[str]], int], *words: str | Path) -> str:
        code = run_command(lambda: main([str(word) for word in words]))
        said = capfd.readouterr()
        assert code == 0, said
        return said.out

    assert "mylab.loca:LOCA" in does(plan.main, recipe, "--gpus", "1", "--gpu", "h100")
    code, said = run(recipe, weight, "trainer.max_duration=2ba")
    assert code == 0, said
    code, said = run(recipe, weight)
    assert code == 0 and "resuming from" in said, said
    folder = tmp_path / "runs" / "tiny"
    lines = metrics(folder)
    assert [line["step"] for line in lines if "loss/LOCA" in line] == [1, 2, 3, 4]
    assert lines[0]["loss/total"] == pytest.approx(2 * lines[0]["loss/LOCA"])
    recorded = yaml.safe_load((folder / "recipe.yaml").read_text())["algorithms"]
    assert recorded == {NAME: {"smoothing": 0.1, "weight": 2.0}}
    code, said = run(recipe, "algorithms.mylab.loca:LOCA.smoothing=0.2")
    assert code == 2 and f"algorithms.{NAME}.smoothing = 0.1, this one 0.2" in said
    data = yaml.safe_load(recipe.read_text())["data"]["path"]
    found = tmp_path / "knn.json"
    does(evaluate.main, "knn", "--model", folder, "--data", data, "k=3", "--output", found)
    assert "top1" in json.loads(found.read_text())["results"]
    does(report.main, folder)
    assert NAME in (folder / "report.html").read_text()
    second = shutil.copytree(folder, folder.with_name("second"))
    changed = (second / "recipe.yaml").read_text().replace("weight: 2.0", "weight: 1.0")
    (second / "recipe.yaml").write_text(changed)
    assert f"algorithms.{NAME}.weight" in does(compare.main, folder, second)
    does(export.main, folder, tmp_path / "out.pth", "--format", "timm")
    assert f"- `{NAME}`: LOCA in short:" in card_of(tmp_path / "out.pth", "timm").read_text()


def test_a_recorded_class_is_imported_only_if_it_is_trusted(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_checkpoint(resolve(load_recipe(recipe)))
    data = load_recipe(recipe).data.path
    monkeypatch.setattr(trust, "_trusted", set())
    forget()
    out = tmp_path / "out.pth"
    for main, words in (
        (evaluate.main, ["knn", "--model", str(folder), "--data", data]),
        (export.main, [str(folder), str(out), "--format", "timm"]),
        (plan.main, [str(recipe), "--gpus", "1", "--gpu", "h100"]),
    ):
        assert run_command(partial(main, words)) == 2
        said = capsys.readouterr().err
        assert f"'{NAME}' is a class of another package" in said and "--trust mylab.loca" in said
    encoder = build_encoder(**load_recipe(recipe).encoder.arguments())
    assert "tensors from" in pospre.load_weights(
        pospre.PretrainModel(encoder, [pospre.MAE()], seed=0), str(folder)
    )
    refuses(r"in Python, import it first", lambda: pospre.load_run(folder))
    assert plan.main([str(recipe), "algorithms.mae={}", "--gpus", "1", "--gpu", "h100"]) == 0
    shown = capsys.readouterr()
    assert "with mae" in shown.out and f"not counted: algorithms: '{NAME}'" in shown.err
    assert train.main([str(recipe), "--resolve"]) == 0
    shown = capsys.readouterr()
    assert f"# as written: algorithms: '{NAME}'" in shown.out and "smoothing: 0.1" in shown.out
    assert not out.exists() and not {"mylab", "mylab.loca"} & sys.modules.keys()
    monkeypatch.setenv(trust.VARIABLE, "other,mylab")
    assert pospre.load_run(folder) and "mylab.loca" in sys.modules


@pytest.mark.parametrize("trusted", [[], ["--trust", "POSPRE_SECRET"]])
def test_a_strangers_address_is_not_asked_for_with_a_secret(
    recipe: Path,
    trusted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def opened(source: str, **options: object) -> None:
        asked.append(source)
        raise UserError("no such bucket")

    monkeypatch.setattr("pospre.training.data.open_reader", opened)
    monkeypatch.setattr("pospre.training.data.build_loader", opened)
    monkeypatch.setenv("POSPRE_SECRET", "hunter2")
    path = "data.path=s3://stranger/${POSPRE_SECRET}"
    assert train.main([str(recipe), path, *trusted, "--resolve"]) == 0
    assert plan.main([str(recipe), path, *trusted, "--gpus", "1", "--gpu", "h100"]) == 0
    capsys.readouterr()
    assert run_command(partial(loader_report.main, [str(recipe), path, *trusted])) == 2
    said = capsys.readouterr().err
    assert asked == ["s3://stranger/hunter2"] * 3 if trusted else asked == []
    assert trusted or ("--trust POSPRE_SECRET" in said and "hunter2" not in said)


def test_the_complete_recipe_is_one_again(recipe: Path, run: Run, tmp_path: Path) -> None:
    code, said = run(recipe, f"algorithms.{NAME}.weight=2", "--resolve")
    assert code == 0, said
    shown = tmp_path / "shown.yaml"
    shown.write_text(said)
    assert load_recipe(shown).algorithms == {NAME: {"smoothing": 0.1, "weight": 2.0}}
    assert "weight: 2.0" in said and "command line" in said
    taken = load_recipe(recipe, [f"algorithms.{NAME}=null", "algorithms.mae={}"])
    assert taken.algorithms == {"mae": {}}


def test_a_class_derived_from_ours_has_its_evaluations(
    tiny: Path, mylab: Path, tmp_path: Path
) -> None:
    (mylab / "better.py").write_text("from pospre import DropPos\nclass Better(DropPos): ...\n")
    data = yaml.safe_load(tiny.read_text())
    data["algorithms"] = {"mylab.better:Better": data["algorithms"]["droppos"]}
    data["trainer"]["run_folder"] = str(tmp_path / "runs")
    recipe = recipe_from_dict({**data, "run_name": "better"})
    with pytest.raises(UserError, match=r"mylab\.better:Better; give a run"):
        check_evaluation("reconstructions", recipe, data["data"]["path"], {}, None)
    found = measured("position_grid", save_checkpoint(recipe), data["data"]["path"])
    assert 0 <= found["mean"] <= 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mylab.other:LOCA", r"no module 'mylab\.other' in .* PYTHONPATH, or install it"),
        ("yourlab.loca:LOCA", r"no module 'yourlab' in"),
        ("mylab.loca:Loca", r"has none of that name\. Did you mean 'LOCA'\?"),
        ("mylab.loca:helper", r"names the class 'helper', and mylab\.loca has a builtin"),
        ("mylab.loca:Places", r"'mylab\.loca:Places' is not an algorithm; derive it from pospre"),
        ("mylab.loca:Sketch", r"'mylab\.loca:Sketch' lacks uses; implement all"),
        (
            "mylab.loca.LOCA",
            r"'mylab\.loca\.LOCA' is not known\. Write your own class as package\.mod",
        ),
        ("mylab/loca.py:LOCA", r"has no module name; write package\.module:Class"),
    ],
)
def test_what_names_no_algorithm_outside_is_said(mylab: Path, name: str, said: str) -> None:
    refuses(said, lambda: algorithm_class(name))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_of_it", r"ModuleNotFoundError: No module named .nothing.* line 1\)"),
        ("\n1 / 0", r"cannot be imported: ZeroDivisionError: .*broken\.py, line 2\)\. `python -c"),
        ("\n\ndef (", r"cannot be imported: SyntaxError: .*broken\.py, line 3\)"),
        ("exit(3)", r"cannot be imported: SystemExit: 3"),
    ],
)
def test_a_module_that_does_not_import_says_why(mylab: Path, code: str, said: str) -> None:
    (mylab / "broken.py").write_text(code)
    refuses(said, lambda: algorithm_class("mylab.broken:LOCA"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"algorithms.{NAME}.smoothing=2", rf"'algorithms\.{NAME}\.smoothing' is 2"),
        (f"algorithms.{NAME}.smoothin=0.2", r"unknown key .*Did you mean 'smoothing'"),
        ("algorithms.mylab.loca:LOCAL.weight=2", r"has no algorithms\.mylab\.loca:LOCAL .*LOCA'"),
    ],
)
def test_a_wrong_option_of_a_class_outside_is_said(recipe: Path, override: str, said: str) -> None:
    refuses(said, lambda: resolve(load_recipe(recipe, [override])))


def test_options_without_types_are_taken_as_they_are(mylab: Path) -> None:
    sketch = importlib.import_module("mylab.loca").Sketch
    assert check_arguments("Sketch", sketch, {"cells": "a"}) == {"cells": "a"}
    with pytest.raises(UserError, match=r"unknown key 'Sketch\.cell'.*'cells'"):
        check_arguments("Sketch", sketch, {"cell": 1})


def test_two_classes_of_one_name_are_refused(recipe: Path, mylab: Path) -> None:
    (mylab / "second.py").write_text("from mylab.loca import LOCA as First\nclass LOCA(First): ...")
    chosen = resolve(load_recipe(recipe, ["algorithms.mylab.second:LOCA={}"]))
    with pytest.raises(UserError, match=r"'mylab.loca:LOCA' and 'mylab.second:LOCA' would both"):
        build_algorithms(chosen)
