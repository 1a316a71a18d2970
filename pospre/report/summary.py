"""The page's words about a run: headline figures, what was trained, environment and commands."""

import os
import platform
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from pospre.report.evaluations import Knn, PositionGrid
from pospre.report.plots import format_value
from pospre.report.run import Record, Run, is_number

PACKAGES = ("torch", "torchvision", "timm", "mosaicml", "mosaicml-streaming", "ffcv", "numpy")


@dataclass(frozen=True)
class Figure:
    """One headline number: what it is, the number, and a word that puts it in relation."""

    label: str
    value: str
    note: str = ""


def headline(run: Run, grid: PositionGrid | None, knn: Knn | None) -> list[Figure]:
    """Return the headline figures that the run has."""
    return [*_loss_figures(run), *_measured_figures(grid, knn), *_effort_figures(run)]


def _loss_figures(run: Run) -> list[Figure]:
    losses = _column(run.records, "loss/total")
    if not losses:
        return []
    note = f"{format_value(losses[0])} at the start" if len(losses) > 1 else ""
    return [Figure("Final loss", format_value(losses[-1]), note)]


def _measured_figures(grid: PositionGrid | None, knn: Knn | None) -> list[Figure]:
    figures = []
    if grid is not None:
        untrained = grid.guess_mean if grid.initial_mean is None else grid.initial_mean
        word = "by guessing" if grid.initial_mean is None else "untrained"
        note = f"{format_value(untrained, percent=True)} {word}"
        value = format_value(grid.mean, percent=True)
        figures.append(Figure("Position accuracy", value, note))
    if knn is not None:
        note = ""
        if knn.initial_top1 is not None:
            note = f"{format_value(knn.initial_top1, percent=True)} untrained"
        figures.append(Figure("kNN top-1", format_value(knn.top1, percent=True), note))
    return figures


def _effort_figures(run: Run) -> list[Figure]:
    figures = []
    throughput = _column(run.records, "throughput")
    if throughput:
        figures.append(Figure("Images/s", format_value(median(throughput)), "median"))
    epochs = _column(run.records, "epoch")
    if epochs:
        planned = run.setting("trainer", "max_duration")
        note = f"{planned} planned" if planned is not None else ""
        figures.append(Figure("Epochs", f"{epochs[-1]:g}", note))
    samples = _column(run.records, "samples")
    if samples:
        steps = format_value(run.records[-1]["step"])
        figures.append(Figure("Samples seen", format_value(samples[-1]), f"{steps} steps"))
    times = _column(run.records, "time")
    if len(times) > 1:
        plural = "" if run.num_resumes == 1 else "s"
        note = f"{run.num_resumes} resume{plural}" if run.num_resumes else "first to last step"
        figures.append(Figure("Time", format_seconds(times[-1] - times[0]), note))
    return figures


def subtitle(run: Run) -> str:
    """Say in one line what was trained on what, and when."""
    model = " ".join(
        part
        for part in (
            " + ".join(run.algorithms),
            "on " + str(run.setting("encoder", "name")) if run.setting("encoder", "name") else "",
            "with " + str(run.setting("data", "path")) if run.setting("data", "path") else "",
        )
        if part
    )
    times = _column(run.records, "time")
    when = f"last step {_date(times[-1])}" if times else ""
    return " · ".join(part for part in (model, when) if part)


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
    checkpoint = str(made.get("checkpoint") or run.folder)
    data = str(made.get("data") or run.setting("data", "path") or "DATA")
    return _command("pospre.evaluate", name, "--checkpoint", checkpoint, "--data", data)


def reproduce_commands(run: Run) -> list[str]:
    """Return the commands that train the run again, measure it again, and write the page again."""
    folder = str(run.folder)
    train = _command("pospre.train", f"{folder}/recipe.yaml", f"run_name={run.name}_again")
    measure = [evaluate_command(run, name) for name in run.evaluations]
    return [train, *measure, _command("pospre.report", folder)]


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


def _command(*words: str) -> str:
    return "python -m " + shlex.join(words)
