"""Means over images or draws, with standard errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pospre.evaluation.registry import DIFFERENCE, UNTRAINED


def rate_error(rate: float, count: int) -> float:
    """Return the standard error of a rate over ``count`` images."""
    return math.sqrt(rate * (1 - rate) / count)


def standard_error(values_M: Tensor) -> Tensor:
    """Return the standard error of the mean over two or more images."""
    return values_M.std(0) / len(values_M) ** 0.5


def jackknife_error(values: Sequence[float], groups: int) -> float:
    """Return the standard error from the values without each of ``groups`` in turn.

    It is √((G − 1)/G · Σ (θ₋ᵢ − θ̄)²), with θ₋ᵢ without group i.
    """
    return float(np.sqrt((groups - 1) * np.var(values))) if len(values) else 0.0


def mean_and_error(name: str, values_M: Tensor) -> dict[str, Any]:
    """Return the mean over images and its standard error, as ``name`` and ``name_se``.

    With a tensor of values per image they are lists. The error of one image is None.
    """
    values_M = values_M.double()
    error = standard_error(values_M) if len(values_M) > 1 else None
    return {
        name: values_M.mean(0).tolist(),
        f"{name}_se": None if error is None else error.tolist(),
    }


def compared(name: str, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the mean over images of every model, and the difference to the untrained one.

    ``values`` (M,) are those of ``Context.models``, by prefix, on the same images. The error of
    ``<name>_difference`` is therefore that of the differences per image: most images are as easy
    for one model as for the other, so it is smaller than from two independent errors. It does not
    include how much another training would differ.
    """
    trained_M, untrained_M = values[""].double(), values.get(UNTRAINED)
    results: dict[str, Any] = {
        name: float(trained_M.mean()),
        f"{UNTRAINED}{name}": None,
        f"{name}{DIFFERENCE}": None,
        f"{name}{DIFFERENCE}_se": None,
    }
    if untrained_M is not None:
        results[f"{UNTRAINED}{name}"] = float(untrained_M.double().mean())
        results |= mean_and_error(f"{name}{DIFFERENCE}", trained_M - untrained_M.double())
    return results
