"""The context of results: published figures, commands that repeat them, the machine.

The published figures are some of those in yamls/PAPERS.md.
"""

import json
import os
import platform
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from pospre.evaluation.registry import default_settings, evaluation_names
from pospre.recipe.yaml_text import VARIABLE
from pospre.reporting.run import Run

PACKAGES = ("torch", "torchvision", "timm", "mosaicml", "mosaicml-streaming", "ffcv", "numpy")
_IMAGENET = 1_281_167  # training images
_LINEAR = {"classes": 1000, "query_samples": 50_000, "label_fraction": 1.0, "augment": True}
_MAE_LINEAR = {**_LINEAR, "protocol": "mae"}
_VISSL_LINEAR = {**_LINEAR, "protocol": "vissl", "weights": "teacher"}
_ADE20K = {"classes": 150, "images": 2000, "finetune": True}
_UPERNET = {**_ADE20K, "decoder": "upernet"}
_SEGMENTED = {**_ADE20K, "decoder": "linear", "weights": "teacher"}
_COCO = {"images": 5000, "finetune": True}
_DETECTED = {**_COCO, "weights": "teacher"}
_PROBE = {"num_samples": 4000, "num_tokens": 196}
_TABLES = (None, "sincos", "learned")  # the encoder's positions of all these papers; None: sincos


class Published(NamedTuple):
    """A published figure of a ViT-B/16 trained on ImageNet-1k."""

    methods: tuple[str, ...]  # the algorithms of the recipe; the last one is the paper's
    epochs: int
    evaluation: str  # that gives it
    percent: str
    words: str
    protocol: Mapping[str, Any]  # results or settings of the evaluation that must be the paper's


_STOP = ("ijepa", "stop")
_LUT = ("mae", "lut")
_BOTH = ("dinov2", "crop_field", "masked_position")
PUBLISHED = (
    Published(("droppos",), 200, "position_grid", "87.83", "weighted mean", {"samples": 50_000}),
    Published(("droppos",), 200, "segmentation", "40.7", "mIoU", _UPERNET),
    Published(("droppos",), 200, "detection", "42.1", "AP", _COCO),
    Published(("droppos",), 800, "position_probe", "77.3", "masked_top1", _PROBE),
    Published(("mae",), 1600, "position_probe", "63.1", "masked_top1", _PROBE),
    Published(("mae",), 1600, "linear", "68.0", "top1", _MAE_LINEAR),
    Published(("ijepa",), 600, "linear", "70.9", "top1", _VISSL_LINEAR),
    Published(_STOP, 600, "linear", "72.6", "top1", _VISSL_LINEAR),
    Published(_LUT, 400, "linear", "67.9", "top1", _MAE_LINEAR),
    Published(_LUT, 1600, "segmentation", "49.5", "mIoU", _UPERNET),
    Published(("dinov2",), 100, "detection", "47.7", "AP", _DETECTED),
    Published(("dinov2",), 100, "segmentation", "47.5", "mIoU", _SEGMENTED),
    Published(_BOTH, 100, "detection", "49.2", "AP", _DETECTED),
    Published(_BOTH, 100, "segmentation", "48.4", "mIoU", _SEGMENTED),
)


def published_beside(run: Run, name: str) -> list[str]:
    """Return known values of evaluation ``name``, in words.

    Only comparable values are returned: the same model, trained by the same methods on as many
    images of ImageNet, and measured with the same protocol.
    """
    document = run.evaluations.get(name, {})
    measured = {**document, **document.get("settings", {}), **document.get("results", {})}
    return [
        f"published for {known.methods[-1]}: {known.percent} % ({known.words}; ViT-B/16, "
        f"{known.epochs} epochs of ImageNet-1k)"
        for known in PUBLISHED
        if measured.get("name") == known.evaluation
        and known.protocol.items() <= {key: measured.get(key) for key in known.protocol}.items()
        and _is_trained_as(run, known)
    ]


def _is_trained_as(run: Run, published: Published) -> bool:
    keys = ("name", "image_size", "depth", "positions")
    encoder = {key: run.setting("encoder", key) for key in keys}
    if encoder["name"] != "vitb16" or encoder["image_size"] not in (None, 224, [224, 224]):
        return False
    samples = run.column("samples")
    wanted = published.epochs * _IMAGENET
    return (
        encoder["depth"] in (None, 12)
        and encoder["positions"] in _TABLES
        and sorted(run.algorithms) == sorted(published.methods)
        and bool(samples)
        and abs(samples[-1] - wanted) < 0.01 * wanted
    )


def evaluate_command(run: Run, name: str) -> str:
    """Return the command that makes ``evaluation/<name>.json``, as recorded or with defaults."""
    made = run.evaluations.get(name, {})
    model = str(made.get("model") or "")
    if not model or VARIABLE.search(model):  # named by the environment
        model = short_path(run.folder)
    planned = run.setting("evaluation", name)
    planned = planned if isinstance(planned, dict) else {}
    trained_on = None if name == "knn" else run.setting("data", "path")  # may have no labels
    path = made.get("data") or planned.get("data") or trained_on
    data = str(path or ("LABELLED" if name == "knn" else "DATA"))
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
    start = str(made.get("start") or "")
    if start and not VARIABLE.search(start):
        words += ["--start", start]
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
    rows += [(package, _version(package)) for package in PACKAGES]
    return rows


@cache
def _version(package: str) -> str:
    """Return a package's version, for which all its metadata are read."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
