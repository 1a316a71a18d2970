"""``make position-table``: what positions and position tasks are worth, on runs of minutes.

Every method of ``yamls/learn`` with every kind of positions: pre-trained, probed for position, and
measured by kNN and by a linear classifier on held-out images (and by segmentation and detection
where their data are given). What does not combine says why. Each cell's figures are lines of
``results/position_table.jsonl``; what is there is not done again, data that are given later add
their figure, and a killed cell resumes from its last checkpoint. The table has means and standard
deviations over the seeds, and names the differences beyond two standard deviations.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tqdm import tqdm

from pospre.errors import UserError, run_command
from pospre.output import markdown_table
from pospre.recipe.recipe import load_recipe, recipe_from_dict
from pospre.training.build import build_model
from pospre.training.resolve import resolve
from tests.benchmarks.learn import RESULTS, YAMLS, call, convert

LINES = RESULTS / "position_table.jsonl"
METHODS = {
    "MAE": "mae",
    "DropPos": "droppos",
    "MP3": "mp3",
    "I-JEPA": "ijepa",
    "StoP": "stop",
    "DINOv2": "dinov2",
    "Intertwined": "intertwined",
    "LUT": "lut",
}
CROP_FIELD = "crop field"
POSITIONS = {
    "none": "none",
    "sin-cos": "sincos",
    "learned": "learned",
    "rotary": "rotary",
    "ALiBi": "alibi",
    "relative": "relative",
    CROP_FIELD: "learned",  # a table as large as the field
}
FIGURES = {
    "position_probe/top1": "position, top-1 %",
    "position_probe/content_top1": "position, none added, top-1 %",
    "knn/top1": "kNN %",
    "logistic/top1": "linear %",
    "segmentation/mIoU": "CamVid mIoU %",
    "detection/AP50": "BCCD AP50 %",
}
BANKED = "knn", "logistic"
SETTINGS: dict[str, tuple[str, ...]] = {
    "position_probe": ("num_samples=600", "layers=[0, 2, 4]"),
    **dict.fromkeys(BANKED, ("num_bank=10000", "num_samples=5000", "batch_size=256")),
    "segmentation": (),
    "detection": (
        *("size=96", "jitter=[0.8, 1.25]", "channels=32", "regions=32"),
        *("iterations=400", "batch_size=4", "lr=0.002", "baseline=false"),
    ),
}
DEVIATIONS = 2

Values = Mapping[tuple[str, str], list[float]]
"""A figure of every seed, by positions and method."""


class Cell(NamedTuple):
    """One run of the table: its method, positions, seed and length."""

    method: str
    positions: str
    seed: int
    duration: str

    @property
    def name(self) -> str:
        words = "position_table", METHODS[self.method], self.positions, self.duration
        return re.sub(r"[^a-z0-9]+", "_", "_".join(words).lower()) + f"_seed{self.seed}"

    def recipe(self, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Return the method's recipe with these positions, and as ``overrides`` change it."""
        own = [f"encoder.positions={POSITIONS[self.positions]}", f"run_name={self.name}"]
        if self.positions == CROP_FIELD:
            own.append("algorithms.crop_field={field_size: 16}")
        path = YAMLS / f"{METHODS[self.method]}.yaml"
        document = load_recipe(path, [*own, f"seed={self.seed}", *overrides]).dump()
        if self.positions != CROP_FIELD:
            document["algorithms"].pop(CROP_FIELD.replace(" ", "_"), None)
        return document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make position-table", description=__doc__)
    parser.add_argument("data", type=Path, help="class folders, or train/ and test/ of them")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--positions", nargs="+", choices=list(POSITIONS), default=list(POSITIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--duration", default="2ep", help="of each training, such as 78ba")
    parser.add_argument("--camvid", type=Path, help="data of the evaluation segmentation")
    parser.add_argument("--bccd", type=Path, help="data of the evaluation detection")
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
        Cell(method, positions, seed, arguments.duration)
        for seed, positions, method in itertools.product(
            arguments.seeds, arguments.positions, arguments.methods
        )
    ]
    if not arguments.table:
        measure(wanted, arguments)
    print(table(lines_of(arguments.set), arguments.duration))
    return 0


def measure(wanted: Iterable[Cell], arguments: argparse.Namespace) -> None:
    """Train the cells and measure what their lines lack; write what is found cell by cell."""
    known = {key_of(line): line for line in lines_of(arguments.set)}
    train, test = convert(arguments.data, arguments.work)
    places = dict.fromkeys(("position_probe", *BANKED), test)
    dense = {"segmentation": arguments.camvid, "detection": arguments.bccd}
    places |= {name: data for name, data in dense.items() if data is not None}
    left = {cell: lacking(known.get(cell), places) for cell in wanted}
    for cell, names in tqdm(
        [item for item in left.items() if item[1]], "position table", unit="cell"
    ):
        found = {**cell._asdict(), "set": arguments.set}
        reason = refusal(cell.recipe(arguments.set))
        if reason is None:
            data = {name: places[name] for name in names}
            found["figures"] = run(cell, train, data, arguments.runs, arguments.set)
        else:
            found["refused"] = reason
        append(LINES, found)


def lacking(line: dict[str, Any] | None, names: Iterable[str]) -> list[str]:
    """Return the evaluations that a cell's line has no figure of; none for a refused cell."""
    if line is None:
        return list(names)
    measured = {figure.partition("/")[0] for figure in line["figures"]}
    return [] if "refused" in line else [name for name in names if name not in measured]


def refusal(recipe: dict[str, Any]) -> str | None:
    """Return why a method does not work with its positions, None if it does."""
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
    asked = [f"evaluation.{name}.{item}" for name in data for item in SETTINGS[name]]
    asked += [f"evaluation.{name}.data={path}" for name, path in data.items()]
    asked += [f"evaluation.{name}.bank={train}" for name in BANKED if name in data]
    asked += [f"data.path={train}", f"trainer.run_folder={runs}"]
    others = tuple(f"evaluation.{name}." for name in SETTINGS if name not in data)
    given = [item for item in given if not item.startswith(others)]
    recipe = cell.recipe([*asked, f"trainer.max_duration={cell.duration}", *given])
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / f"{cell.name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    call("pospre.train", str(path))
    figures: dict[str, float | None] = {}
    for figure in FIGURES:
        name, _, key = figure.partition("/")
        if name in data:
            results = read_results(runs / cell.name / "evaluation" / f"{name}.json")
            figures |= {figure: results.get(key), f"{name}/chance": results.get("chance")}
            if "top1" in key:
                figures[figure.replace("top1", "initial")] = initial_of(results, key)
    return {name: value for name, value in figures.items() if value is not None}


def read_results(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


def initial_of(results: dict[str, Any], key: str) -> float | None:
    """Return a figure of the untrained encoder, None where it was not measured."""
    shown_as = "content" if key == "content_top1" else "image"
    found = [
        row["top1"]
        for row in results.get("rows", [])
        if (row["model"], row["shown_as"]) == ("untrained", shown_as)
    ]
    return found[-1] if found else results.get("initial_top1")


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


def lines_of(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return a line for each cell that was measured with these changes of the recipes.

    Figures that were measured later join those before them. The precision, which depends on the
    processor, may differ.
    """
    wanted = _without_precision(overrides)
    merged: dict[Cell, dict[str, Any]] = {}
    for line in read_lines(LINES):
        if _without_precision(line["set"]) == wanted:
            earlier = merged.get(key_of(line), {}).get("figures", {})
            merged[key_of(line)] = {**line, "figures": earlier | line.get("figures", {})}
    return list(merged.values())


def _without_precision(overrides: Iterable[str]) -> list[str]:
    return [item for item in overrides if not item.startswith("trainer.precision=")]


def key_of(line: dict[str, Any]) -> Cell:
    return Cell(line["method"], line["positions"], line["seed"], line["duration"])


def table(lines: list[dict[str, Any]], duration: str) -> str:
    """Return all figures of one length as Markdown: a table for each, then what differs."""
    lines = [line for line in lines if line["duration"] == duration]
    seeds = sorted({line["seed"] for line in lines})
    parts = [f"{len(lines)} cells of {duration}; mean ± standard deviation over the seeds {seeds}."]
    for figure, title in FIGURES.items():
        values = by_cell(lines, figure)
        if not values:
            continue
        parts.append(_grid(title, values, lines))
        initial = by_cell(lines, figure.replace("top1", "initial"))
        untrained = [100 * value for found in initial.values() for value in found]
        if figure.endswith("top1") and untrained:
            parts.append(f"Untrained: {min(untrained):.1f} to {max(untrained):.1f}.")
        chances = by_cell(lines, figure.partition("/")[0] + "/chance")
        levels = sorted({value for found in chances.values() for value in found})
        if len(levels) > 1:  # by the number of patches
            parts.append(f"Chance: {levels[0]:.1%} to {levels[-1]:.1%}, by method.")
        parts.append(differences(values, chances))
    reasons = {line["refused"]: line["method"] for line in lines if "refused" in line}
    parts += [f"- {method}: {reason}" for reason, method in reasons.items()]
    return "\n\n".join(parts)


def by_cell(lines: list[dict[str, Any]], figure: str) -> Values:
    """Return one figure of all seeds, by positions and method."""
    values: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        if figure in line.get("figures", {}):
            values.setdefault((line["positions"], line["method"]), []).append(
                line["figures"][figure]
            )
    return values


def _grid(title: str, values: Values, lines: list[dict[str, Any]]) -> str:
    refused = {(line["positions"], line["method"]) for line in lines if "refused" in line}
    rows = []
    for positions in POSITIONS:
        pairs = [(positions, method) for method in METHODS]
        rows.append([positions, *(_cell(values.get(pair), pair in refused) for pair in pairs)])
    return markdown_table([title, *METHODS], rows)


def _cell(values: list[float] | None, is_refused: bool) -> str:
    if not values:
        return "–" if is_refused else ""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def differences(values: Values, chances: Values) -> str:
    """Say which cells of one method, or of one kind of positions, differ beyond chance.

    The difference of two means is beyond two standard deviations if it exceeds twice the root of
    the sum of both cells' variances over seeds: of single runs, not of means. Cells of one seed
    have none and are left out; so are pairs whose level of chance differs.
    """
    several = {cell: found for cell, found in values.items() if len(found) > 1}
    if len(several) < 2:
        return "No two cells have two seeds, so no deviation is known."
    found = []
    for pair in itertools.combinations(several, 2):
        apart = pair[0][0] != pair[1][0] and pair[0][1] != pair[1][1]
        if apart or len({tuple(set(chances.get(cell, ()))) for cell in pair}) > 1:
            continue
        low, high = sorted(pair, key=lambda cell: statistics.fmean(several[cell]))
        gap = statistics.fmean(several[high]) - statistics.fmean(several[low])
        deviation = sum(statistics.variance(several[cell]) for cell in pair) ** 0.5
        if gap > DEVIATIONS * deviation:
            names = [f"{method} ({positions})" for positions, method in (high, low)]
            found.append(f"{names[0]} > {names[1]} by {100 * gap:.1f}")
    if not found:
        return "No difference lies beyond two standard deviations."
    return f"Beyond two standard deviations: {'; '.join(found)}."


if __name__ == "__main__":
    sys.exit(run_command(main))
