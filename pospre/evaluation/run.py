"""Run one evaluation by name and save its results."""

import datetime
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pospre.errors import UserError
from pospre.evaluation.common_settings import Settings
from pospre.evaluation.features import check_views
from pospre.evaluation.figures import finite
from pospre.evaluation.models import Start, open_model, subject_of
from pospre.evaluation.registry import (
    Context,
    Plan,
    check_settings,
    evaluate_by_name,
    evaluation_module,
    named_in_errors,
)
from pospre.model.algorithm import algorithm_class, algorithm_names, method_of
from pospre.model.model import PretrainModel
from pospre.output import check_output, write_output
from pospre.recipe.provenance import Taken, concealed
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from pospre.training.data import storage
from pospre.untrusted_json import parse_json


class Checked(NamedTuple):
    """An evaluation that can run.

    Attributes:
        settings: all of them, typed.
        opened: see ``Context``.
        missing: why it will not give some of its figures, by figure.
    """

    settings: Settings
    opened: Any
    missing: Mapping[str, str]


def check_evaluation(
    name: str,
    recipe: Recipe,
    data_path: str | Path,
    settings: Mapping[str, Any],
    output: Path | None,
    *,
    has_start: bool = False,
) -> Checked:
    """Raise a ``UserError`` if ``run_evaluation`` would fail with these arguments; no model."""
    checked = check_settings(name, settings)
    module = evaluation_module(name)
    needed = getattr(module, "NEEDS", None)
    if needed is not None and method_of(recipe.algorithms, needed) is None:
        has = ", ".join(recipe.algorithms)
        there = f"this recipe has {has}" if has else "these are weights without a run's heads"
        able = [name for name in algorithm_names() if algorithm_class(name).offers(needed)]
        raise UserError(
            f"{name} measures what algorithms.{' or algorithms.'.join(able)} trains, but {there}; "
            "give a run or checkpoint with it. knn, logistic and position_probe measure the "
            "features of any encoder."
        )
    check_output("--output", output, ".json")
    if output is not None:
        _check_replaced(name, output)
    folder = None if output is None else output.with_suffix("")
    plan, opened = Plan(name, recipe, str(data_path), checked, folder, has_start), None
    with named_in_errors(name):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UserError(f"its pictures would go to the folder {folder}, which is a file")
        if hasattr(module, "check"):
            opened = module.check(plan)
        if not getattr(module, "OWN_DATA", False):
            if check_views(recipe, str(data_path)):
                _say_once(
                    f"{data_path} holds images of the training; figures of other images may be "
                    "lower"
                )
            if bank := getattr(checked, "bank", None):
                check_views(recipe, bank)
    missing = module.missing(plan, opened) if hasattr(module, "missing") else {}
    return Checked(checked, opened, missing)


@cache
def _say_once(text: str) -> None:
    """Print a line once: several evaluations, and each time during training, would repeat it."""
    print(text, file=sys.stderr)


def _check_replaced(name: str, output: Path) -> None:
    """Refuse to overwrite JSON of other kinds; earlier results, even damaged ones, are replaced."""
    try:
        document = parse_json(output.read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(document, dict) or document.get("name") != name:
        raise UserError(
            f"--output {output} exists, but is not a result of {name}; give another file, or "
            "remove it."
        )


def run_evaluation(
    name: str,
    model: PretrainModel,
    recipe: Recipe,
    data_path: str | Path,
    settings: Mapping[str, Any] | None = None,
    output: Path | None = None,
    *,
    address: str = "",
    weights: str = "student",
    device: str = "auto",
    progress: bool = True,
    origin: str = "",
    step: int | None = None,
    go_on: Callable[[], None] = lambda: None,
    initial: Callable[[], PretrainModel] | None = None,
    start: Start | None = None,
) -> dict[str, Any]:
    """Evaluate a model on the images at ``data_path``, as ``measure`` does.

    The model is whole, without DDP wrapper. It is moved to ``device``, and its mode (train or eval)
    is restored. References to environment variables in its recipe are recorded instead of their
    values. Pictures go into a folder of the same name beside ``output``. ``address``, ``weights``
    and ``step`` are only for the record. For ``origin`` see ``Subject``, for ``go_on`` and
    ``initial`` ``Context``; without ``initial``, the recipe makes the untrained model. ``start`` is
    measured beside the model.

    Returns:
        The content of the JSON: ``name``, ``model`` (its address), ``weights``, ``step`` (if
        given), ``encoder_sha256`` (see ``encoder_hash``), ``data``, ``created``, ``settings``,
        ``results``, for models without a run ``encoder`` (its description), and with a start
        ``start`` and ``start_sha256``.
    """
    if origin:
        print(origin, file=sys.stderr)
    torch_device = find_device(device)
    checked, opened, _ = check_evaluation(
        name, recipe, data_path, settings or {}, output, has_start=start is not None
    )
    require_finite(model, address or "the model")
    make_initial = initial or (lambda: build_model(recipe))
    was_training, measured = model.training, encoder_hash(model)
    context = Context(
        model=model.to(torch_device).eval(),
        initial=lambda: make_initial().to(torch_device).eval(),
        start=None if start is None else lambda: start.model.to(torch_device).eval(),
        moved={} if start is None else start.moved,
        data=str(data_path),
        device=torch_device,
        folder=None if output is None else output.with_suffix(""),
        progress=progress,
        opened=opened,
        storage=storage(recipe),
        go_on=go_on,
    )
    try:
        with whole_float32():
            results = evaluate_by_name(name, context, checked)
    finally:
        model.train(was_training)
    taken = recipe.environment
    document = {
        "name": name,
        "model": concealed(address, taken),
        "weights": weights,
        **({} if step is None else {"step": step}),
        "encoder_sha256": measured,
        "data": concealed(str(data_path), taken),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": concealed(checked.values(), taken),
        "results": results,
        **({} if recipe.algorithms else {"encoder": recipe.encoder.model_dump(mode="json")}),
        **({} if start is None else _described(start, taken)),
    }
    if output is not None:
        write_json(output, document)
    return document


def _described(start: Start, taken: Mapping[str, Taken]) -> dict[str, Any]:
    """Return the record of the weights that a run started from."""
    return {
        "start": concealed(start.address, taken),
        "start_sha256": encoder_hash(start.model),
    }


def encoder_hash(model: PretrainModel) -> str:
    """Return the SHA-256 of the encoder's tensors and names, for any file format."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def whole_float32() -> Iterator[None]:
    """Use full float32 products on GPUs: Composer's trainer sets TF32 with a 10-bit mantissa.

    Figures are then the same during training and after it.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def require_finite(model: PretrainModel, name: str) -> None:
    """Raise a ``UserError`` naming the model ``name`` if a weight is infinite or NaN."""
    for key, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"{name}: tensor '{key}' holds values that are not finite;  the training diverged. "
                "Use an earlier checkpoint."
            )


def find_device(name: str) -> torch.device:
    """Return the device for ``auto`` (a GPU if there is one), ``cpu`` or ``gpu``."""
    if name not in ("auto", "cpu", "gpu"):
        raise UserError(f"device '{name}' is unknown; use auto, cpu or gpu.")
    if name == "gpu" and not torch.cuda.is_available():
        raise UserError("device gpu, but torch finds no GPU; use auto or cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` as JSON, atomically; numbers that are not finite are null."""
    write_output(path, json.dumps(finite(document), indent=2) + "\n")


def measure(
    name: str,
    model: str | nn.Module,
    data: str | Path,
    settings: Mapping[str, Any] | None = None,
    *,
    output: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: bool = False,
) -> dict[str, Any]:
    """Return the figures of evaluation ``name``, the same as ``python -m pospre.evaluate``.

    Args:
        name: ``knn``, …; ``python -m pospre.evaluate --help`` lists them, ``NAME --help`` their
            settings.
        model: a ``PretrainModel``, a timm ViT, or any ``--model`` of the command.
        data: images to measure on: folder, ``.beton`` file or MDS directory.
        settings: settings of the evaluation; others keep their defaults.
        output: JSON file for the full record; None: nothing is written.
        seed: seed of random weights, if the model has none, and of the untrained model's.
        device: ``auto``, ``cpu`` or ``gpu``; a model passed in is moved there.
        progress: whether to draw progress bars.

    Raises:
        UserError: see ``open_model``, ``subject_of`` and ``run_evaluation``.
    """
    if isinstance(model, str):
        subject, address = open_model(model, seed=seed), model
    else:
        subject, address = subject_of(model, seed=seed), type(model).__name__
    document = run_evaluation(
        name,
        data_path=data,
        settings=settings,
        output=output,
        address=address,
        device=device,
        progress=progress,
        **subject._asdict(),
    )
    return document["results"]
