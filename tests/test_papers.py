"""Every row of yamls/PAPERS.md that says it runs is built: recipes, evaluations, conversions."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from data_prep.convert import _parser as conversion_parser
from pospre.errors import UserError
from pospre.evaluate import parse_settings
from pospre.evaluation.registry import check_settings, evaluation_module
from pospre.evaluation.sweep_runs import cells_of
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.build import build_model
from pospre.training.resolve import resolve

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "yamls" / "PAPERS.md").read_text(encoding="utf-8")
PAPERS = {"MP3": 29, "DropPos": 19, "StoP": 22, "LUT": 22, "Intertwined": 16}
LOOP = re.compile(r"for (\w) in (.+?); do (.+); done")
EVALUATE = re.compile(
    r"python -m pospre\.evaluate (\w+) --model (\S+)(?: --weights \w+)? --data (\S+)(.*)"
)


@dataclass(frozen=True)
class Row:
    """A line of a paper's table."""

    paper: str
    name: str
    commands: tuple[str, ...]
    status: str
    published: str
    ours: str

    @property
    def runs(self) -> bool:
        return self.status == "runs"


def rows() -> Iterator[Row]:
    for section in re.split(r"^## ", TEXT, flags=re.M)[1:]:
        paper = section.partition("\n")[0]
        for line in re.findall(r"^\| (?!row )(.*)\|$", section, re.M):
            name, commands, *rest = (cell.strip() for cell in line.split("|"))
            yield Row(paper, name, tuple(re.findall(r"`([^`]+)`", commands)), *rest)


ROWS = list(rows())


def spelled(command: str) -> list[str]:
    """Return the commands of a shell loop, perhaps of loops in it, or the command itself."""
    loop = LOOP.fullmatch(command)
    if loop is None:
        return [command]
    name, values, body = loop.groups()
    bodies = [re.sub(rf"\${name}\b|\${{{name}}}", value, body) for value in values.split()]
    return [each for body in bodies for each in spelled(body)]


def commands(row: Row) -> list[str]:
    """Return a row's commands, those of its loops one by one."""
    return [command for given in row.commands for command in spelled(given)]


@cache
def trained(command: str) -> Recipe:
    """Return the recipe that a command trains."""
    name, *overrides = shlex.split(command.partition("-m pospre.train ")[2])
    return resolve(load_recipe(ROOT / name, overrides))


def test_all_rows_are_there_and_the_count_is_that_of_the_table() -> None:
    counts = {paper: sum(row.paper == paper for row in ROWS) for paper in PAPERS}
    assert counts == PAPERS
    assert len({(row.paper, row.name) for row in ROWS}) == sum(PAPERS.values()) == 108
    texts = (TEXT, Path("README.md").read_text(encoding="utf-8"))
    counts_told = [re.findall(r"(\d+) of 108 rows", text) for text in texts]
    assert counts_told == [[str(sum(row.runs for row in ROWS))]] * 2


def test_a_row_says_what_it_is() -> None:
    for row in ROWS:
        assert row.runs or re.match(r"(needs|refused): \S", row.status), row.status
        assert row.published and (row.commands or not row.runs), row.name


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.runs], ids=lambda row: f"{row.paper}-{row.name}"
)
def test_what_runs_is_built(row: Row) -> None:
    for command in commands(row):
        _check(command)


def _check(command: str) -> None:
    if " -m pospre.train " in command:
        recipe = trained(command)
        assert recipe.run_path() in runs() and _weights_are_trained(recipe)
        _build(recipe)
    elif " -m pospre.evaluate " in command:
        _check_evaluation(command)
    elif " -m pospre.sweep " in command:
        name, *settings = shlex.split(command)[3:]
        cells = cells_of(str(ROOT / name), settings)
        assert len(cells) > 1 and _weights_are_trained(cells[0].recipe)
        _build(resolve(cells[0].recipe))
    elif " -m data_prep.convert " in command:
        conversion_parser().parse_args(shlex.split(command)[3:])
    elif command.startswith("make "):
        assert f"\n{shlex.split(command)[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    else:
        found = re.fullmatch(r"python -m pospre\.report (\S+)", command)
        assert found is not None and Path(found[1]) in runs(), command


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.status.startswith("refused") and row.commands]
)
def test_what_is_refused_is_refused(row: Row) -> None:
    for command in commands(row):
        with pytest.raises(UserError, match=r"algorithms\.stop needs a predictor"):
            _build(trained(command))


@cache
def runs() -> dict[Path, Recipe]:
    """Return the recipes of all runs that the table's commands leave, by their folders.

    Commands that train different things under one name would meet in one folder.
    """
    found: dict[Path, Recipe] = {}
    for row in ROWS:
        for command in commands(row):
            if " -m pospre.train " in command and row.runs:
                recipe = trained(command)
                assert found.setdefault(recipe.run_path(), recipe) == recipe, command
    return found


def _weights_are_trained(recipe: Recipe) -> bool:
    weights = recipe.encoder.weights
    return weights is None or weights.endswith(".pth") or Path(weights) in runs()


_BUILT: set[str] = set()


def _build(recipe: Recipe) -> None:
    """Build a recipe's model without memory, its encoder cut to a block (Swin has all).

    Recipes that differ in other things than their model are built once.
    """
    depth = None if recipe.encoder.name == "swin_tiny" else 1
    encoder = recipe.encoder.model_copy(update={"depth": depth, "weights": None})
    algorithms = {name: dict(options) for name, options in recipe.algorithms.items()}
    if "supervised" in algorithms and algorithms["supervised"]["num_classes"] is None:
        algorithms["supervised"]["num_classes"] = 2  # which the data would say
    recipe = recipe.model_copy(update={"encoder": encoder, "algorithms": algorithms})
    key = f"{recipe.data.views} {encoder} {algorithms}"
    if key in _BUILT:
        return
    with torch.device("meta"):
        assert build_model(recipe).objectives
    _BUILT.add(key)


def _check_evaluation(command: str) -> None:
    found = EVALUATE.fullmatch(command)
    assert found is not None, command
    name, model, _, rest = found.groups()
    settings = [word for word in shlex.split(rest) if "=" in word]
    check_settings(name, parse_settings(settings))
    if model.startswith("runs/"):
        needed = getattr(evaluation_module(name), "NEEDS", None)
        assert needed is None or needed in runs()[Path(model)].algorithms
