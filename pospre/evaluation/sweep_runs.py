"""A grid of runs of one recipe, and its results.

The figures of each run are those of the recipe's evaluations. The report has the mean and standard
deviation of each setting over its seeds. It has the best and both over the grid as well, as
Kornblith et al. (2019) do for transfer with a grid of rates and weight decays.
"""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pospre.errors import UserError
from pospre.evaluation.figures import figures_in, read_document
from pospre.evaluation.planned import planned_evaluations
from pospre.evaluation.recipe_evaluations import check_evaluations
from pospre.evaluation.results_table import list_table
from pospre.recipe.provenance import COMPARED
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.recipe.yaml_text import read_mapping
from pospre.training.data import open_data
from pospre.training.reference import with_encoders
from pospre.training.resolve import resolve


class Cell(NamedTuple):
    """One run of a grid: the varied keys' values, and all overrides with the ``run_name``."""

    values: dict[str, str]
    overrides: list[str]
    recipe: Recipe

    @property
    def is_done(self) -> bool:
        """Whether this exact recipe is trained, with every figure measured at its end."""
        entries = planned_evaluations(self.recipe)
        if not all(entry.every is None and entry.output.exists() for entry in entries):
            return False
        if any(key in self.recipe.environment for key in COMPARED):
            return False  # only its checkpoints show whether they are the same
        trained = read_mapping(self.recipe.run_path() / "recipe.yaml")
        recipe = with_encoders(self.recipe)
        return trained == resolve(recipe, open_data(recipe)).record()


def cells_of(recipe: str, settings: Sequence[str]) -> list[Cell]:
    """Return the runs of a grid, each with its own folder, without training.

    Settings are ``key=value``, or ``key=value,value`` for a varied key; commas within brackets do
    not separate values.
    """
    parted = [(item, *_values(item)) for item in settings]
    axes = {key: values for _, key, values in parted if len(values) > 1}
    fixed = [item for item, _, values in parted if len(values) == 1]
    if not axes:
        raise UserError(
            "a sweep needs a key with several values, such as optimizer.base_lr=1e-3,5e-4."
        )
    for key, values in axes.items():
        if [given for _, given, _ in parted].count(key) > 1:
            raise UserError(f"{key} is given twice; write all its values after one {key}=.")
        if len(set(values)) < len(values):
            raise UserError(f"{key}={','.join(values)} repeats a value.")
    name = load_recipe(recipe, fixed).run_name
    cells = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        parts = [f"{key.rpartition('.')[2]}{value}" for key, value in chosen.items()]
        run_name = "_".join([name, *(re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts)])
        overrides = [*fixed, *(f"{k}={v}" for k, v in chosen.items()), f"run_name={run_name}"]
        cells.append(Cell(chosen, overrides, load_recipe(recipe, overrides)))
    return cells


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise a ``UserError`` for a grid without figures, or with invalid evaluations."""
    if not cells[0].recipe.evaluation:
        raise UserError(
            "a sweep compares the figures of the recipe's evaluations, but it has none; add one, "
            "such as evaluation.accuracy.data=PATH."
        )
    for cell in cells:
        check_evaluations(cell.recipe)


def summarise(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the results of finished runs: ``runs``, ``settings`` and ``figures``.

    A run has ``values``, ``run_name`` and ``figures`` by ``EVALUATION/FIGURE``. A setting has the
    ``values`` but the seed, and of each of its ``figures`` over the seeds ``mean``, ``deviation``
    (of the sample) and ``runs``. ``figures`` has these over the grid, ``best`` and ``best_run``.
    """
    runs, better = [], {}
    for cell in cells:
        figures = {}
        for entry in planned_evaluations(cell.recipe):
            for figure in figures_in(read_document(entry.output)):
                figures[f"{entry.name}/{figure.name}"] = figure.value
                better[f"{entry.name}/{figure.name}"] = figure.best
        runs.append({"values": cell.values, "run_name": cell.recipe.run_name, "figures": figures})
    return {
        "runs": runs,
        "settings": _settings(runs),
        "figures": {name: _summary(runs, name, better[name]) for name in better},
    }


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each setting over its seeds."""
    groups: dict[tuple[tuple[str, str], ...], list[Mapping[str, float]]] = {}
    for run in runs:
        setting = tuple((key, value) for key, value in run["values"].items() if key != "seed")
        groups.setdefault(setting, []).append(run["figures"])
    return [
        {
            "values": dict(setting),
            "figures": {
                name: _spread([each[name] for each in of_runs if name in each])
                for name in dict.fromkeys(name for each in of_runs for name in each)
            },
        }
        for setting, of_runs in groups.items()
    ]


def _summary(runs: Sequence[Mapping[str, Any]], name: str, better: str) -> dict[str, Any]:
    values = {run["run_name"]: run["figures"][name] for run in runs if name in run["figures"]}
    best = (max if better == "max" else min)(values, key=lambda run: values[run])
    return {"best": values[best], "best_run": best, **_spread([*values.values()])}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "runs": len(values),
    }


def table(summary: Mapping[str, Any]) -> str:
    """Return the figures of all runs, of settings over several seeds, and of the grid, as text."""
    runs = [{**run["values"], **run["figures"]} for run in summary["runs"]]
    tables = [list_table("runs", runs)]
    settings = summary["settings"]
    if 1 < len(settings) < len(runs):
        rows = [
            {**each["values"], "figure": name, **numbers}
            for each in settings
            for name, numbers in each["figures"].items()
        ]
        tables.append(list_table("settings, over their seeds", rows))
    figures = [{"figure": name, **numbers} for name, numbers in summary["figures"].items()]
    return "\n\n".join([*tables, list_table("figures, over all runs", figures)])


def _values(item: str) -> tuple[str, list[str]]:
    """Return key and values of ``key=value,value``."""
    key, equals, text = item.partition("=")
    if not equals or not key or not text:
        raise UserError(f"'{item}' is not a setting; write key=value or key=value,value.")
    values, depth = [""], 0
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            values.append("")
        else:
            values[-1] += char
    if not all(value.strip() for value in values):
        raise UserError(f"'{item}' has an empty value; write key=value,value without spaces.")
    return key, [value.strip() for value in values]
