"""Means over images or draws, with standard errors, as results and as table rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pospre.output import percent_and_error

MODELS = {"trained": "", "untrained": "initial_"}
"""Titles of the rows of a model and its baseline, and prefixes of their figures."""


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


def estimate_rows(results: Mapping[str, Any], titles: Mapping[str, str]) -> list[list[str]]:
    """Return rows with title, mean and standard error of the figures in ``titles``."""
    rows = []
    for name, title in titles.items():
        error = results[f"{name}_se"]
        rows.append([title, f"{results[name]:.4f}", "–" if error is None else f"{error:.4f}"])
    return rows


def percent_rows(
    results: Mapping[str, Any], columns: Sequence[str], prefixes: Mapping[str, str] = MODELS
) -> list[list[str]]:
    """Return rows with title and percentages, with standard errors if there are any.

    ``prefixes`` are those of the columns' names, by the row's title. A row whose first figure is
    None is left out.
    """
    rows = []
    for title, prefix in prefixes.items():
        names = [f"{prefix}{name}" for name in columns]
        if results[names[0]] is not None:
            cells = (percent_and_error(results[name], results.get(f"{name}_se")) for name in names)
            rows.append([title, *cells])
    return rows
