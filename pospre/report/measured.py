"""What stands beside the results: the commands that repeat them, and the machine."""

import json
import os
import platform
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pospre.evaluation.registry import default_settings, evaluation_names
from pospre.recipe.yaml_text import VARIABLE
from pospre.report.run import Run

PACKAGES = ("torch", "torchvision", "timm", "mosaicml", "mosaicml-streaming", "ffcv", "numpy")


def evaluate_command(run: Run, name: str) -> str:
    """Return the command that makes ``evaluation/<name>.json``, as recorded or with defaults."""
    made = run.evaluations.get(name, {})
    model = str(made.get("model") or "")
    if not model or VARIABLE.search(model):  # named by the environment
        model = short_path(run.folder)
    planned = run.setting("evaluation", name) or {}
    trained_on = None if name == "knn" else run.setting("data", "path")  # may have no labels
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
    """Return the commands that train and evaluate the run again, and write the page."""
    folder = short_path(run.folder)
    # with another run name: it must not use or overwrite this run's checkpoints
    apart = ("trainer.save_folder=null", "trainer.overwrite=false")
    train = _command("pospre.train", f"{folder}/recipe.yaml", f"run_name={run.name}_again", *apart)
    measure = [evaluate_command(run, name) for name in run.evaluations]
    return [train, *measure, _command("pospre.report", folder)]


def environment(run: Run) -> list[tuple[str, str]]:
    """Return the recipe's settings of the machine, and the current versions."""
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


def short_path(path: Path) -> str:
    """Return ``path`` relative to the current folder if it lies within it."""
    here = Path.cwd()
    full = path.absolute()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(path)


def _plain(value: object) -> str:
    """Write a setting's value for the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _command(*words: str) -> str:
    return "python -m " + shlex.join(words)
