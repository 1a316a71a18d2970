"""The page's words about a run: headline figures, what was trained, environment and commands."""

import json
import os
import platform
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from pospre.evaluation.registry import default_settings, evaluation_names
from pospre.recipe.yaml_text import VARIABLE
from pospre.report.evaluations import Knn, PositionGrid
from pospre.report.plots import format_value
from pospre.report.run import Record, Run
from pospre.schedules import DURATION
from pospre.untrusted_json import is_number

PACKAGES = ("torch", "torchvision", "timm", "mosaicml", "mosaicml-streaming", "ffcv", "numpy")


@dataclass(frozen=True)
class Figure:
    """One headline figure: what it is, its value, and a word that puts it in relation."""

    label: str
    value: str
    note: str = ""


def headline(run: Run, grid: PositionGrid | None, knn: Knn | None) -> list[Figure]:
    """Return the headline figures that the run has."""
    return [*_loss_figures(run), *_measured_figures(run, grid, knn), *_effort_figures(run)]


def start_of(run: Run) -> str:
    """Return the name of the weights that training started from; empty where these were random."""
    address = str(run.setting("encoder", "weights") or "")
    inside = address.rstrip("/").partition("/checkpoints")[0]  # a run is called by its folder
    return inside.rpartition("/")[2]


def _loss_figures(run: Run) -> list[Figure]:
    losses = _column(run.records, "loss/total")
    if not losses:
        return []
    note = f"from {format_value(losses[0])}" if len(losses) > 1 else ""
    return [Figure("Final loss", format_value(losses[-1]), note)]


def _measured_figures(run: Run, grid: PositionGrid | None, knn: Knn | None) -> list[Figure]:
    figures = []

    def add(name: str, label: str, value: float, *notes: str) -> None:
        note = "; ".join(filter(None, (*notes, earlier_step(run, name))))
        figures.append(Figure(label, format_value(value, percent=True), note))

    if grid is not None:
        untrained = grid.guess_mean if grid.initial_mean is None else grid.initial_mean
        word = "by guessing" if grid.initial_mean is None else "untrained"
        notes = (
            f"mean of {len(grid.cells)} cells",
            f"{format_value(untrained, percent=True)} {word}",
        )
        add("position_grid", "Position top-1", grid.mean, *notes)
    top1 = accuracy_of(run)
    if top1 is not None:
        start = start_of(run)
        add("accuracy", "Accuracy", top1, f"started from {start}" if start else "")
    if knn is not None:
        other = knn.initial_top1
        beside = "" if other is None else f"{format_value(other, percent=True)} untrained"
        add("knn", "kNN top-1", knn.top1, beside)
    return figures


def accuracy_of(run: Run) -> float | None:
    """Return the accuracy of a class head, as evaluation ``accuracy`` has measured it."""
    top1 = run.evaluations.get("accuracy", {}).get("results", {}).get("top1")
    return top1 if is_number(top1) else None


def _effort_figures(run: Run) -> list[Figure]:
    figures = []
    throughput = _column(run.records, "throughput")
    if throughput:
        rate = float(f"{median(throughput):.3g}")
        figures.append(Figure("Images/s", format_value(rate), "median"))
    planned = {"ep": "", "ba": "", "sp": ""}  # the end of training, in its own unit
    duration = DURATION.fullmatch(str(run.setting("trainer", "max_duration")))
    if duration:
        planned[duration[2]] = f"of {format_value(int(duration[1]))}"
    epochs = _column(run.records, "epoch")
    if epochs:
        figures.append(Figure("Epoch", f"{epochs[-1] + 1:g}", planned["ep"]))  # logged from 0
    steps = _column(run.records, "step")
    if steps and planned["ba"]:
        figures.append(Figure("Step", format_value(steps[-1]), planned["ba"]))
    samples = _column(run.records, "samples")
    if samples:
        note = planned["sp"] or f"{format_value(steps[-1])} steps"
        figures.append(Figure("Samples seen", format_value(samples[-1]), note))
    seconds = _training_seconds(run.records)
    if seconds:
        figures.append(Figure("Training time", format_seconds(seconds), "without pauses"))
    return figures


def _training_seconds(records: list[Record]) -> float:
    """Add up the lines' samples over their throughput: a run may have been stopped for days."""
    seconds = 0.0
    before = 0.0
    for record in records:
        samples, rate = record.get("samples"), record.get("throughput")
        if is_number(samples) and is_number(rate) and rate > 0:
            seconds += (samples - before) / rate
            before = samples
    return seconds


def subtitle(run: Run) -> str:
    """Say in one line what was trained on what, and when."""
    wanted = {"on": run.setting("encoder", "name"), "with": run.setting("data", "path")}
    words = [f"{word} {value}" for word, value in wanted.items() if value]
    start = start_of(run)
    words += [f"started from {start}"] if start else []
    times = _column(run.records, "time")
    when = f"last step {_date(times[-1])}" if times else ""
    return " · ".join(filter(None, (" ".join([" + ".join(run.algorithms), *words]).strip(), when)))


def environment(run: Run) -> list[tuple[str, str]]:
    """Return what the recipe says about the machine, and the versions here and now."""
    wanted = {
        "Device": run.setting("trainer", "device"),
        "Precision": run.setting("trainer", "precision"),
        "Global batch": run.setting("data", "batch_size"),
        "Seed": run.setting("seed"),
    }
    rows = [(label, str(value)) for label, value in wanted.items() if value is not None]
    rows.append(("Python", f"{platform.python_version()}, {platform.system()}"))
    rows.append(("Processor", f"{os.cpu_count()} cores, {platform.machine()}"))
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, "not installed"))
    return rows


def evaluate_command(run: Run, name: str) -> str:
    """Return the command that makes ``evaluation/<name>.json``, as it was or as it could be."""
    made = run.evaluations.get(name, {})
    model = str(made.get("model") or "")
    if not model or VARIABLE.search(model):  # which the environment has named
        model = short_path(run.folder)
    planned = run.setting("evaluation", name) or {}
    trained_on = None if name == "knn" else run.setting("data", "path")  # which may have no labels
    found = made.get("data") or planned.get("data") or trained_on
    data = str(found or ("LABELLED" if name == "knn" else "DATA"))
    elsewhere = ("data", "weights", "every")
    given = made.get("settings") or {k: v for k, v in planned.items() if k not in elsewhere}
    kind = str(made.get("name") or name)
    usual = default_settings(kind) if kind in evaluation_names() else {}
    settings = [
        f"{key}={_plain(value)}"
        for key, value in given.items()
        if key not in usual or _plain(value) != _plain(usual[key])
    ]
    words = ["pospre.evaluate", kind, "--model", model, "--data", data]
    if (made or planned).get("weights") == "teacher":
        words += ["--weights", "teacher"]
    if kind != name:
        words += ["--output", f"{short_path(run.folder)}/evaluation/{name}.json"]
    return _command(*words, *settings)


def reproduce_commands(run: Run) -> list[str]:
    """Return the commands that train the run again, measure it again, and write the page again."""
    folder = short_path(run.folder)
    # a run of its own: it must not meet, or overwrite, the checkpoints of this one
    apart = ("trainer.save_folder=null", "trainer.overwrite=false")
    train = _command("pospre.train", f"{folder}/recipe.yaml", f"run_name={run.name}_again", *apart)
    measure = [evaluate_command(run, name) for name in run.evaluations]
    return [train, *measure, _command("pospre.report", folder)]


def measured_on(run: Run, name: str) -> str:
    """Say on which data and weights evaluation ``name`` was made, where they may mislead."""
    data = run.evaluations.get(name, {}).get("data")
    if not data:
        return ""
    trained = trained_on_these(run, name)
    words = f"measured on {data}" + (", the pictures it was trained on" if trained else "")
    step = earlier_step(run, name)
    return words + (f"; {step}, not of the last" if step else "")


def trained_on_these(run: Run, name: str) -> bool:
    """Tell whether evaluation ``name`` was made on the images of the training."""
    data = run.evaluations.get(name, {}).get("data")
    return bool(data) and data == run.setting("data", "path")


def earlier_step(run: Run, name: str) -> str:
    """Say of which step the weights of evaluation ``name`` are, if the run has gone on since."""
    step = run.evaluations.get(name, {}).get("step")
    last = _column(run.records, "step")[-1:]
    return f"of step {format_value(step)}" if is_number(step) and last > [step] else ""


def short_path(path: Path) -> str:
    """Return ``path`` as one types it here: relative where it lies under the current folder."""
    here = Path.cwd()
    full = path.absolute()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(path)


def format_seconds(seconds: float) -> str:
    """Write a duration for people: ``42 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def _column(records: list[Record], key: str) -> list[float]:
    return [record[key] for record in records if is_number(record.get(key))]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _plain(value: object) -> str:
    """Write a setting's value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _command(*words: str) -> str:
    return "python -m " + shlex.join(words)
