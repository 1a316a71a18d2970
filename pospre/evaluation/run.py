"""Running one evaluation by name and keeping its results."""

import datetime
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pospre.errors import UserError
from pospre.evaluation.features import check_views
from pospre.evaluation.models import open_model, subject_of
from pospre.evaluation.registry import (
    Context,
    Plan,
    check_settings,
    evaluate_by_name,
    evaluation_module,
    named_in_errors,
    settings_class,
)
from pospre.model.algorithm import algorithm_class, algorithm_names, method_of
from pospre.model.model import PretrainModel
from pospre.output import check_output, write_output
from pospre.recipe.environment import concealed
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from pospre.training.data import storage
from pospre.untrusted_json import parse_json


def check_evaluation(
    name: str,
    recipe: Recipe,
    data_path: str | Path,
    settings: Mapping[str, Any],
    output: Path | None,
) -> tuple[dict[str, Any], Any]:
    """Find out without a model what would make ``run_evaluation`` fail with these arguments.

    Returns:
        All settings, typed, and what was ``opened``, see ``Context``.

    Raises:
        UserError: unknown evaluation or setting, data that are missing or not for this evaluation,
            an algorithm that the recipe lacks, or an output that cannot be written.
    """
    checked = check_settings(name, settings)
    module = evaluation_module(name)
    needed = getattr(module, "NEEDS", None)
    if needed is not None and method_of(recipe.algorithms, needed) is None:
        has = ", ".join(recipe.algorithms)
        there = f"this recipe has {has}" if has else "these are weights without heads, no run's"
        able = [name for name in algorithm_names() if algorithm_class(name).offers(needed)]
        raise UserError(
            f"{name} measures what algorithms.{' or algorithms.'.join(able)} trains, and {there}; "
            "name a run or checkpoint that has it. knn, logistic and position_probe measure the "
            "features of any encoder."
        )
    check_output("--output", output, ".json")
    _check_replaced(name, output)
    folder = None if output is None else output.with_suffix("")
    opened = None
    with named_in_errors(name):
        if hasattr(module, "check"):
            plan = Plan(name, recipe, str(data_path), settings_class(name)(**checked), folder)
            opened = module.check(plan)
        if not getattr(module, "OWN_DATA", False):
            for path in filter(None, (str(data_path), checked.get("bank"))):
                check_views(recipe, path)
    return checked, opened


def _check_replaced(name: str, output: Path | None) -> None:
    """Refuse to replace JSON of other kinds; an earlier result, whole or damaged, is replaced."""
    if output is None:
        return
    try:
        found = parse_json(output.read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(found, dict) or found.get("name") != name:
        raise UserError(
            f"--output {output} exists and is no result of {name}; name another file, or remove it."
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
    step: int | None = None,
    go_on: Callable[[], None] = lambda: None,
    initial: Callable[[], PretrainModel] | None = None,
) -> dict[str, Any]:
    """Evaluate ``model`` on the images at ``data_path``.

    Args:
        name: an evaluation, see ``registry.evaluation_names``.
        model: a whole model: not wrapped by DDP, nor sharded. It is moved to ``device``, and its
            mode (train or eval) is what it was afterwards.
        recipe: what the model was made from; its untrained twin is built from it. What is written
            has references for what its environment gave.
        data_path: folder, ``.beton`` file or MDS directory.
        settings: of this evaluation; the others keep their defaults.
        output: where to write the JSON; pictures go into a folder of the same name beside it. None
            writes nothing.
        address: where the model came from, for the record.
        weights: ``student`` or ``teacher``: which of the checkpoint's, for the record.
        device: ``auto``, ``cpu`` or ``gpu``.
        progress: whether to draw progress bars.
        step: how many steps the model is trained, for the record, where that is known.
        go_on: see ``Context``.
        initial: see ``Context``, on the CPU; the recipe's model without it.

    Returns:
        What the JSON holds: ``name``, ``model`` (its address), ``weights``, ``step`` (where it is
        given), ``encoder_sha256`` (see ``encoder_hash``), ``data``, ``created``, ``settings``,
        ``results``, and ``encoder`` (what it is like) where no run of ours has trained it.

    Raises:
        UserError: unknown evaluation or setting, data that cannot be read, or a model that this
            evaluation is not for.
    """
    place = find_device(device)
    checked, opened = check_evaluation(name, recipe, data_path, settings or {}, output)
    require_finite(model, address or "the model")
    make_initial = initial or (lambda: build_model(recipe))
    was_training, measured = model.training, encoder_hash(model)
    context = Context(
        model=model.to(place).eval(),
        initial=lambda: make_initial().to(place).eval(),
        data=str(data_path),
        device=place,
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
        "settings": concealed(checked, taken),
        "results": results,
        **({} if recipe.algorithms else {"encoder": recipe.encoder.model_dump(mode="json")}),
    }
    if output is not None:
        write_json(output, document)
    return document


def encoder_hash(model: PretrainModel) -> str:
    """Return the SHA-256 of the encoder's tensors, by their names: of whichever file they are."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.encoder.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


@contextmanager
def whole_float32() -> Iterator[None]:
    """Let GPUs multiply float32 as it is: Composer's trainer has them round it to TF32, 10 bits.

    A figure is then the same during a training and after it.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def require_finite(model: PretrainModel, name: str) -> None:
    """Raise a ``UserError`` if a weight of ``model`` is infinite or NaN; ``name`` says whose."""
    for key, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"{name}: tensor '{key}' holds values that are not finite; the training diverged. "
                "Use an earlier checkpoint."
            )


def find_device(name: str) -> torch.device:
    """Return the device called ``auto`` (a GPU where there is one), ``cpu`` or ``gpu``.

    Raises:
        UserError: another name, or there is no GPU.
    """
    if name not in ("auto", "cpu", "gpu"):
        raise UserError(f"device '{name}' is not known; use auto, cpu or gpu.")
    if name == "gpu" and not torch.cuda.is_available():
        raise UserError("device gpu, but torch sees no GPU; use auto or cpu.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` as JSON, whole or not at all."""
    write_output(path, json.dumps(document, indent=2) + "\n")


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
    """Return the figures of evaluation ``name``, as ``python -m pospre.evaluate`` finds them.

    Args:
        name: ``knn``, …: ``python -m pospre.evaluate --help`` lists them, ``NAME --help`` its
            settings.
        model: a ``PretrainModel``, a ViT of timm, or what the command takes as ``--model``.
        data: images to measure on: folder, ``.beton`` file or MDS directory.
        settings: of the evaluation; the others keep their defaults.
        output: where to write the whole record as JSON; nothing is written without it.
        seed: of random weights: the model's where it has no others, and its untrained twin's.
        device: ``auto``, ``cpu`` or ``gpu``; a model given is moved there.
        progress: whether to draw progress bars.

    Raises:
        UserError: see ``open_model``, ``subject_of`` and ``run_evaluation``.
    """
    if isinstance(model, str):
        subject, address = open_model(model, seed=seed), model
    else:
        subject, address = subject_of(model, seed=seed), type(model).__name__
    if subject.origin:
        print(subject.origin, file=sys.stderr)
    document = run_evaluation(
        name,
        subject.model,
        subject.recipe,
        data,
        settings,
        output,
        address=address,
        device=device,
        progress=progress,
        step=subject.step,
        initial=subject.initial,
    )
    results: dict[str, Any] = document["results"]
    return results
