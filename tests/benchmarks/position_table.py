"""``make position-table``: what positions are worth to a host, with contrasts declared before.

Every row of the asked blocks, positions or a task, under its hosts: trained, and measured by
kNN and a linear classifier at the training's size, by kNN at two and four times as many patches a
side, by the position probe, and by segmentation where its data are given. What does not combine
says why. Each cell's figures are lines of ``results/position_table.jsonl``. A cell is known by its
recipe, its seed and a hash of the code that its training imports; a figure also by its evaluation's
settings and code. So nothing is done again that cannot have changed, and a killed cell resumes from
its last checkpoint. The text that is printed has every figure, what is missing, and one sentence
for each declared contrast.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from pospre.errors import UserError, run_command
from pospre.evaluation.registry import check_settings, evaluation_module, settings_class
from pospre.model.algorithm import algorithm_class
from pospre.nn.positions import named_scheme, scheme_class
from pospre.recipe.recipe import load_recipe, recipe_from_dict
from pospre.training.build import build_model, resolve
from tests.benchmarks.code_hash import code_hash
from tests.benchmarks.learn import RESULTS, YAMLS, call, convert, training_figures
from tests.benchmarks.position_report import BLANK, BLOCKS, FIGURES, HOSTS, OWN, report

LINES = RESULTS / "position_table.jsonl"
HOST_RECIPES = {"supervised": Path(__file__).parent / "supervised.yaml"}
_COLOURS = {"jitter": [0.4, 0.4, 0.2, 0.1], "jitter_rate": 0.8}
TASKS: dict[str, dict[str, Any]] = {
    "DropPos": {
        "algorithms.droppos": {
            **{"position_mask_ratio": 0.5, "temperature": None, "affinity": "visible"},
            **{"decoder_dim": 96, "decoder_depth": 2, "decoder_heads": 3},
        }
    },
    "SP": {
        "data.views.pair": {"count": 2, "size": 16, "scale": [0.1, 0.5], "augment": _COLOURS},
        "algorithms.sp": {"weight": 0.5},
    },
    "LUT": {
        "data.views.second": {"crop": "simple", "augment": _COLOURS},
        "algorithms.lut": {"hidden_dim": 512, "momentum_start": 0.98},
    },
    "masked position": {"algorithms.masked_position": {"shape": "cross"}},
    "cyclic masks": {"algorithms.dinov2.mask_shape": "cyclic"},
    "SIGReg": {"algorithms.dinov2.spread": "sigreg"},
    "context": {"algorithms.ijepa.context_weight": 0.5},
}
"""What each adds to its host's recipe, at the size of those in ``yamls/learn``."""
POSITIONS: dict[str, Any] = {
    "learned": "learned",
    "plain rotary": {"rotary": {"coordinates": "cells", "columns_first": True}},
    "DINOv3's rotary": "rotary",
    "with jitter": {"rotary": {"rescale": 2.0}},
    "none": "none",
    "sin-cos": "sincos",
    "mixed rotary": "rotary_mixed",
    "ALiBi": "alibi",
    "torus": "torus",
    "LookHere": "lookhere",
    "four directions": {"rotary": {"directions": 4}},
    **dict.fromkeys(TASKS, "rotary"),
}
BANKED = ("num_bank=20000", "num_samples=10000", "batch_size=256", "baseline=false")
SETTINGS: dict[str, tuple[str, ...]] = {
    "knn": BANKED,
    "logistic": BANKED,
    "shifted_positions": (
        *("num_samples=1000", "shifts=[]", "zooms=[]", "scales=[2, 4]", "mosaics=[2, 4]"),
        "baseline=false",
    ),
    "position_probe": ("num_samples=600", "layers=[4]"),
    "segmentation": (
        *("size=96", "ignore=11", "augment=false", "iterations=300", "baseline=false"),
    ),
}
TRAINING = (
    *("pospre.model.model", "pospre.data.loader", "pospre.augment.device"),
    *("pospre.training.step_trainer", "pospre.training.optimizer.groups"),
)
UNNAMED = ("run_name", "evaluation")
"""Keys of a recipe that no cell is known by; nor by where its data and runs are."""


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    row: str
    host: str
    seed: int

    def recipe(self, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Return the host's recipe with the row's positions or task, and with ``overrides``."""
        path = HOST_RECIPES.get(self.host, YAMLS / f"{self.host}.yaml")
        positions = json.dumps(POSITIONS[self.row])
        task = [f"{key}={json.dumps(value)}" for key, value in TASKS.get(self.row, {}).items()]
        own = (f"encoder.positions={positions}", f"seed={self.seed}", *task)
        return load_recipe(path, [*own, *overrides]).dump()

    def key(self, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Return what a line of this cell must have: names, seed, recipe and code."""
        given = [item for item in overrides if not item.startswith("evaluation.")]
        recipe = self.recipe([*given, "data.path=x", "trainer.run_folder=x"])
        known = {key: value for key, value in recipe.items() if key not in UNNAMED}
        code = code_hash(sorted({*TRAINING, *self._modules(recipe)}))
        return {**vars(self), "recipe": _hash(known), "code": code}

    def name(self, overrides: Sequence[str] = ()) -> str:
        """Return the name of this cell's run, another for other code."""
        key = self.key(overrides)
        words = "".join(each if each.isalnum() else "_" for each in f"{self.host}_{self.row}")
        return f"table_{words}_{self.seed}_{key['recipe'][:6]}{key['code'][:6]}"

    def _modules(self, recipe: Mapping[str, Any]) -> list[str]:
        scheme, _ = named_scheme(POSITIONS[self.row])
        methods = [algorithm_class(name).__module__ for name in recipe["algorithms"]]
        return [scheme_class(scheme).__module__, *methods]


@cache
def evaluation_key(name: str, overrides: tuple[str, ...] = ()) -> str:
    """Return a hash of an evaluation's settings, with ``overrides`` of a recipe, and its code."""
    start = f"evaluation.{name}."
    own = [item.removeprefix(start) for item in overrides if item.startswith(start)]
    given = dict(item.split("=", 1) for item in (*SETTINGS[name], *own))
    banks = {"bank": "x"} if "bank" in settings_class(name).names() else {}
    settings = check_settings(name, {**banks, **given})
    return _hash([settings.values(), code_hash([evaluation_module(name).__name__])])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make position-table", description=__doc__)
    parser.add_argument("data", type=Path, help="class folders, or train/ and test/ of them")
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=["A"])
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=HOSTS, help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--camvid", type=Path, help="data of the evaluation segmentation")
    parser.add_argument("--work", type=Path, default=Path("data/learn"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="key=value",
        help="of all recipes; a table of its own",
    )
    parser.add_argument("--table", action="store_true", help="print what was measured, run nothing")
    arguments = parser.parse_args(argv)
    wanted = [
        Cell(row, host, seed)
        for seed in arguments.seeds
        for block in arguments.blocks
        for row, host in BLOCKS[block].cells
        if host in arguments.hosts
    ]
    if not arguments.table:
        measure(wanted, arguments)
    lines = read_lines(LINES)
    found = {cell: line_of(cell.key(arguments.set), lines, arguments.set) for cell in wanted}
    known = {(cell.row, cell.host, cell.seed): line for cell, line in found.items() if line}
    print(report(arguments.blocks, known, arguments.seeds))
    return 0


def measure(wanted: Sequence[Cell], arguments: argparse.Namespace) -> None:
    """Train the cells and measure what their lines lack; write what is measured cell by cell."""
    train, test = convert(arguments.data, arguments.work)
    data = {name: test for name in SETTINGS if name != "segmentation"}
    if arguments.camvid is not None:
        data["segmentation"] = arguments.camvid
    lines = read_lines(LINES)
    left = {}
    for cell in wanted:
        key = cell.key(arguments.set)
        names = lacking(line_of(key, lines, arguments.set), data)
        if names:
            left[cell] = key, names
    for cell, (key, names) in tqdm(left.items(), "position table", unit="cell"):
        reason = refusal(cell.recipe(arguments.set))
        if reason is None:
            chosen = {name: data[name] for name in names}
            key["measured"] = {name: evaluation_key(name, (*arguments.set,)) for name in names}
            key["figures"] = run(cell, train, chosen, arguments.runs, arguments.set)
        else:
            key["refused"] = reason
        append(LINES, key)


def line_of(
    key: Mapping[str, Any], lines: Sequence[dict[str, Any]], overrides: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Return the line of a cell with all its figures, those measured later among them."""
    own = [line for line in lines if all(line.get(name) == value for name, value in key.items())]
    figures = {
        figure: value
        for line in own
        for figure, value in line.get("figures", {}).items()
        if (name := figure.partition("/")[0]) not in SETTINGS
        or line["measured"][name] == evaluation_key(name, (*overrides,))
    }
    return {**own[-1], "figures": figures} if own else None


def lacking(line: Mapping[str, Any] | None, names: Mapping[str, Path]) -> list[str]:
    """Return the evaluations that a cell's line has no figure of; none for a refused cell."""
    if line is None:
        return list(names)
    measured = {figure.partition("/")[0] for figure in line["figures"]}
    return [] if "refused" in line else [name for name in names if name not in measured]


def refusal(recipe: dict[str, Any]) -> str | None:
    """Return why a host does not work with its positions, None if it does."""
    try:
        with torch.device("meta"):
            build_model(resolve(recipe_from_dict(recipe)))
    except UserError as error:
        return str(error)
    return None


def run(
    cell: Cell, train: Path, data: Mapping[str, Path], runs: Path, given: Sequence[str]
) -> dict[str, float]:
    """Train a cell, measure it by the evaluations of ``data`` with it, and return its figures."""
    name = cell.name(given)
    asked = [f"evaluation.{name}.{item}" for name in data for item in SETTINGS[name]]
    asked += [f"evaluation.{name}.data={path}" for name, path in data.items()]
    asked += [f"evaluation.{name}.bank={train}" for name in ("knn", "logistic") if name in data]
    asked += [f"run_name={name}", f"data.path={train}", f"trainer.run_folder={runs}"]
    others = tuple(f"evaluation.{name}." for name in SETTINGS if name not in data)
    given = [item for item in given if not item.startswith(others)]
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / f"{name}.yaml"
    path.write_text(yaml.safe_dump(cell.recipe([*asked, *given]), sort_keys=False), "utf-8")
    call("pospre.train", str(path))
    figures: dict[str, float] = {}
    for evaluation in data:
        figures |= figures_of(
            evaluation, read_results(runs / name / "evaluation" / f"{evaluation}.json")
        )
    metrics = runs / name / "metrics.jsonl"
    training = training_figures(metrics)
    figures["training/ms"] = 60_000 * training["minutes"] / training["steps"]
    return figures | own_measure(training["last"], metrics.read_text("utf-8"))


def own_measure(last: Mapping[str, float], metrics: str) -> dict[str, float]:
    """Return what a task that predicts places reaches at the end, and last on blank images."""
    found: dict[str, float] = {}
    for line in map(json.loads, metrics.splitlines()):
        for key in (key for key in line if "_blank_" in key):
            found = {OWN: last[key.replace("_blank_", "_")], BLANK: line[key]}
    return found


def read_results(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


def figures_of(evaluation: str, results: Mapping[str, Any]) -> dict[str, float]:
    """Return an evaluation's figures of the table by their names."""
    if evaluation == "shifted_positions":
        tops = {row["what"]: row["top1"] for row in results["rows"]}
        rows, columns = results["grid"]
        names = {"x1": "as usual"}
        names |= {f"x{s}": f"image at {s * rows} x {s * columns} patches" for s in (2, 4)}
        names |= {f"mosaic{s}": f"tile of {s} x {s}" for s in (2, 4)}
        named = {f"{evaluation}/{key}": tops.get(name) for key, name in names.items()}
        return {name: top1 for name, top1 in named.items() if top1 is not None}
    asked = [figure.partition("/")[2] for figure in FIGURES if figure.startswith(evaluation)]
    figures = {f"{evaluation}/{key}": results[key] for key in asked}
    untrained = [row["top1"] for row in results.get("rows", []) if row.get("model") == "untrained"]
    return {**figures, f"{evaluation}/untrained": untrained[-1]} if untrained else figures


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file of lines; half a line of a killed run before it is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file; what a kill has cut is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
