"""Every row of yamls/PAPERS.md: its commands are parsed, checked and built, and measure."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pospre.evaluate
import pospre.sweep
import pospre.train
from data_prep.convert import _parser as conversion_parser
from pospre.data.stores.description import TrainedOn
from pospre.errors import UserError
from pospre.evaluation import models
from pospre.evaluation.classification import accuracy
from pospre.evaluation.recipe_evaluations import check_evaluations
from pospre.evaluation.run import check_evaluation
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe, load_recipe, recipe_from_dict
from pospre.training.build import build_model
from pospre.training.data import open_data
from pospre.training.foreign import Foreign, open_foreign
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.optimizer.schedule import build_schedule
from pospre.training.resolve import resolve
from tests.benchmarks import bench_methods
from tests.papers import ROOT, ROWS, TEXT, Row, runs, trained, words_of, write_data

PAPERS = {"MP3": 29, "DropPos": 19, "StoP": 22, "LUT": 22, "Intertwined": 16}
IMAGENET = 1_281_167
FOREIGN = {
    **{f"{name}_vitb16.pth": "vitb16" for name in ("dino", "mae", "ibot", "droppos")},
    "mae_pretrain_vit_huge.pth": "vith14",
}
TIMED: list[bench_methods.Row] = []
SUBJECT = models._subject


def test_all_rows_are_there_and_the_counts_are_those_of_the_table() -> None:
    counts = {paper: sum(row.paper == paper for row in ROWS) for paper in PAPERS}
    assert counts == PAPERS
    assert len({(row.paper, row.name) for row in ROWS}) == sum(PAPERS.values()) == 108
    kinds = Counter(re.split(r"[ :]", row.status)[0] for row in ROWS)
    whole = sum(row.status == "runs" for row in ROWS)
    told = re.search(
        r"^- \*\*(\d+) of 108 rows\*\* .*?^- (\d+) measure .*?^- (\d+) quote nothing .*?"
        r"^- (\d+) are \*refused\*.*?^- (\d+) \*needs\*",
        TEXT,
        re.M | re.S,
    )
    assert told is not None
    others = [kinds["runs"] - whole, kinds["trains"], kinds["refused"], kinds["needs"]]
    assert [int(number) for number in told.groups()] == [whole, *others]
    assert whole + sum(others) == 108
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) of 108 rows", readme) == [str(whole)]


def test_a_row_says_what_it_is() -> None:
    for row in ROWS:
        known = r"runs( but for \S.*)?|trains|(needs|refused): \S.*"
        assert re.fullmatch(known, row.status), row.status
        assert row.published and (row.commands or not row.runs), row.name
        assert (row.status == "trains") == (row.published == "–"), row.name


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.status.startswith("runs")], ids=lambda row: row.name
)
def test_a_row_measures_what_it_trains(row: Row) -> None:
    """Each of its runs is measured by its recipe, by a command of the row, or by a run from it."""
    commands = row.spelled()
    trainings = [trained(command) for command in commands if " -m pospre.train " in command]
    starts = {recipe.encoder.weights for recipe in trainings}
    words = {word for command in commands for word in re.split(r"[ =,]", command)}
    for recipe in trainings:
        name = str(recipe.run_path())
        assert recipe.evaluation or name in starts or f"runs/{recipe.run_name}" in words, name
    assert ("Real" in row.published) == any("reassessed=" in command for command in commands)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder where all that the commands name is there."""
    folder = tmp_path_factory.mktemp("papers")
    write_data(folder)
    (folder / "yamls").symlink_to(ROOT / "yamls")
    for run in runs():
        (folder / run).mkdir(parents=True)
        (folder / run / "recipe.yaml").touch()
    for file in FOREIGN:
        (folder / file).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("trunc_normal_", "kaiming_uniform_", "xavier_uniform_", "uniform_", "normal_"):
            patch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)  # half of the time
        patch.setattr(pospre.train, "_run", _check_training)
        patch.setattr(pospre.sweep, "_run", lambda command: 1)  # all cells are checked before
        patch.setattr(models, "open_checkpoint", lambda run: SimpleNamespace(uri=run, batch=1))
        patch.setattr(models, "model_of", lambda found, **_: _load_model(found.uri))
        patch.setattr(accuracy, "load_model", _load_model)
        patch.setattr(models, "open_foreign", _open_foreign)
        patch.setattr(models, "_subject", _subject)
        patch.setattr("pospre.evaluation.run.run_evaluation", _check_measurement)
        patch.setattr(bench_methods, "measure_row", lambda row, *_: TIMED.append(row))
        yield folder


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.runs], ids=lambda row: f"{row.paper}-{row.name}"
)
def test_what_runs_is_parsed_checked_and_built(row: Row, place: Path) -> None:
    for command in row.spelled():
        _check(command)


class Checked(Exception):
    """Ends a command where its work would begin."""


def _check(command: str) -> None:
    module, given = words_of(command)
    if module == "pospre.train":
        assert trained(command).run_path() in runs()
        assert pospre.train.main(given) == 0
    elif module == "pospre.evaluate":
        with pytest.raises(Checked):
            pospre.evaluate.main(given)
    elif module == "pospre.sweep":
        assert pospre.sweep.main(given) == 1
    elif module == "data_prep.convert":
        conversion_parser().parse_args(given)
    elif given[0] == "make":
        _check_target(given)
    else:
        assert module == "pospre.report" and Path(given[0]) in runs(), command


def _check_training(arguments: Any) -> int:
    recipe = resolve(load_recipe(arguments.recipe, arguments.overrides))
    weights = recipe.encoder.weights
    assert weights is None or weights.endswith(".pth") or Path(weights) in runs(), weights
    check_evaluations(recipe)
    model, _ = _built(recipe)
    build_schedule(
        build_optimizer(model, recipe.optimizer, batch_size=recipe.data.batch_size),
        recipe.schedule,
        rates=recipe.optimizer,
        max_duration=recipe.trainer.max_duration,
        steps_per_epoch=IMAGENET // recipe.data.batch_size,
        batch_size=recipe.data.batch_size,
    )
    return 0


_RATES = ("lr", "weight_decay", "seed")  # which no check looks at: one for a grid of them
_MEASURED: set[str] = set()


def _check_measurement(name: str, **given: Any) -> None:
    recipe, data, settings, output = (
        given[key] for key in ("recipe", "data_path", "settings", "output")
    )
    fitted = {key: value for key, value in settings.items() if key not in _RATES}
    key = f"{name} {recipe.encoder} {recipe.algorithms} {data} {fitted}"
    if key not in _MEASURED:
        check_evaluation(name, recipe, data, settings, output)
    _MEASURED.add(key)
    raise Checked


def _check_target(words: list[str]) -> None:
    plan = subprocess.run(
        ["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True, check=True
    )
    line = next(line for line in plan.stdout.splitlines() if "bench_methods.py" in line)
    TIMED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", shlex.split(line.partition("python ")[2]))
        assert bench_methods.main() == 0
    assert TIMED


_BUILT: dict[str, tuple[PretrainModel, TrainedOn]] = {}


def _built(recipe: Recipe) -> tuple[PretrainModel, TrainedOn]:
    """Return a recipe's model without memory, and its data; made once for all with the same."""
    key = f"{recipe.data.path} {recipe.data.views} {recipe.encoder} {recipe.algorithms}"
    if key not in _BUILT:
        whole = resolve(recipe, open_data(recipe))
        with torch.device("meta"):
            _BUILT[key] = build_model(whole), whole.trained_on
    return _BUILT[key]


def _load_model(run: str) -> tuple[PretrainModel, Recipe]:
    recipe = runs()[Path(run)]
    model, data = _built(recipe)
    return model, resolve(recipe).with_training_data(data)


def _open_foreign(address: str, *args: Any, **options: Any) -> Foreign:
    """Stand for published weights, which are not here."""
    if address not in FOREIGN:
        return open_foreign(address, *args, **options)
    model: Any = None  # nothing looks at its weights
    return Foreign(model, FOREIGN[address], address)


def _subject(model: Any, seed: int, name: str = "", origin: str = "") -> models.Subject:
    if model is not None:
        return SUBJECT(model, seed, name, origin)
    recipe = recipe_from_dict(
        {
            "run_name": "model",
            "data": {"path": "none", "batch_size": 1},
            "encoder": {"name": name, "image_size": 224},
            "algorithms": {"mae": {}},
            "trainer": {"max_duration": "1ba"},
        }
    ).model_copy(update={"algorithms": {}})
    nothing: Any = model
    return models.Subject(nothing, recipe, lambda: nothing, origin=origin)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.status.startswith("refused") and row.commands]
)
def test_what_is_refused_is_refused(row: Row) -> None:
    for command in row.spelled():
        with (
            torch.device("meta"),
            pytest.raises(UserError, match=r"algorithms\.stop needs algorithms\.ijepa"),
        ):
            build_model(trained(command))
