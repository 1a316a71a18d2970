"""Measuring from Python: one call for a run, a file, a model of ours or one of timm's."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pospre.evaluation.models import open_model, subject_of
from pospre.evaluation.run import run_evaluation


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
