"""Figures over images or draws, with standard errors, and differences between two models."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from pospre.evaluation.paired import Paired, of_images, of_jackknife
from pospre.evaluation.registry import DIFFERENCE, OVER, UNTRAINED


def rate_error(rate: float, count: int) -> float:
    """Return the standard error of a rate over ``count`` images."""
    return math.sqrt(rate * (1 - rate) / count)


def standard_error(values_M: Tensor) -> Tensor:
    """Return the standard error of the mean over two or more images."""
    return values_M.std(0) / len(values_M) ** 0.5


class Estimate(NamedTuple):
    """A figure over images, and what it is without each image, or group of images, in turn.

    The spread of these is its error (the jackknife). Patches, pixels and objects of an image are
    left out together, because they depend on each other.

    Attributes:
        value: of all images.
        without_G: float64; NaN where nothing is left to measure.
    """

    value: float
    without_G: ndarray

    @property
    def error(self) -> float | None:
        """The standard error √((G − 1)/G · Σ (θ₋ᵢ − θ̄)²), with θ₋ᵢ without group i.

        Of a mean it is the usual one. None: fewer than two groups.
        """
        known = self.without_G[~np.isnan(self.without_G)]
        return float(np.sqrt((len(known) - 1) * np.var(known))) if len(known) > 1 else None


def share(parts_M: Tensor, wholes_M: Tensor) -> Estimate:
    """Return Σ parts / Σ wholes over images, such as correct patches and predicted ones."""
    parts, wholes = (each.double().cpu().numpy() for each in (parts_M, wholes_M))
    left = wholes.sum() - wholes
    without = np.divide(parts.sum() - parts, left, out=np.full_like(left, np.nan), where=left > 0)
    return Estimate(float(parts.sum() / wholes.sum()), without)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of figures over the same images."""
    values, without = zip(*estimates, strict=True)
    return Estimate(statistics.fmean(values), np.mean(without, axis=0))


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
    """Return the mean over images of every model, and the differences to the other ones.

    ``values`` (M,) are those of ``Context.models``, by prefix, on the same images; bool: right.
    """
    means = {key: share(value_M, torch.ones(len(value_M))) for key, value_M in values.items()}
    results = {name: means[""].value, **against_untrained(name, means)}
    for other in _others(values):
        change = of_images(*(values[key].cpu().numpy() for key in ("", other)))
        results |= {f"{other}{name}": means[other].value, _over(name, other): change.model_dump()}
    return results


def against_untrained(name: str, by_model: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return a figure of the untrained model, and the difference to it with its paired error.

    ``by_model`` are the figures of ``Context.models``, by prefix, over the same images in the same
    groups. The error of ``<name>_difference`` is that of the difference without each group in turn:
    most images are as easy for one model as for the other, so it is smaller than from two
    independent errors. It does not include how much another training would differ. Without an
    untrained model all are None.
    """
    trained, untrained, gain = by_model[""], by_model.get(UNTRAINED), None
    if untrained is not None:
        without_G = trained.without_G - untrained.without_G
        gain = Estimate(trained.value - untrained.value, without_G)
    return {
        f"{UNTRAINED}{name}": untrained and untrained.value,
        f"{name}{DIFFERENCE}": gain and gain.value,
        f"{name}{DIFFERENCE}_se": gain and gain.error,
    }


def with_differences(
    by_model: Mapping[str, Mapping[str, Estimate]], *, images: int | None = None
) -> dict[str, Any]:
    """Return the figures of every model with their errors, and the differences between them.

    ``by_model`` are the figures by name, of each model by prefix; ``images`` is the number of
    images, if these are left out in groups.
    """
    results: dict[str, Any] = {}
    for prefix, figures in by_model.items():
        for name, figure in figures.items():
            results |= {f"{prefix}{name}": figure.value, f"{prefix}{name}_se": figure.error}
    for name in by_model[""]:
        of_models = {key: figures[name] for key, figures in by_model.items()}
        results |= against_untrained(name, of_models)
        for other in _others(of_models):
            paired = difference(of_models[""], of_models[other], images)
            results[_over(name, other)] = paired.model_dump()
    return results


def difference(own: Estimate, other: Estimate, images: int | None = None) -> Paired:
    """Compare two figures over the same images in the same groups, by the jackknife."""
    gain = Estimate(own.value - other.value, own.without_G - other.without_G)
    return of_jackknife(gain.value, gain.without_G, gain.error, images)


def _others(by_model: Mapping[str, Any]) -> list[str]:
    """Return the prefixes of the models that the first one is compared with image by image."""
    return [prefix for prefix in by_model if prefix not in ("", UNTRAINED)]


def _over(name: str, prefix: str) -> str:
    return f"{name}{OVER}{prefix}".removesuffix("_")
