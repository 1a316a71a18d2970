"""Logistic regression on frozen features: quick, to compare encoders; or StoP's for 1 % of labels.

A linear classifier is fitted to the pooled features of a labelled bank and measured on other
images. Features are standardised with the bank's statistics; the weight decay is the best of a few
on a tenth of the bank that the choice does not train on. No augmentation, nothing random; most
papers train a layer for tens of epochs on random crops, so that their figures are others.

``protocol=stop`` is what StoP's published code measures I-JEPA and StoP with on 1 % of ImageNet's
labels (Bar et al. 2024, ``logistic_eval.py``): the measured images are standardised with their own
statistics, as the bank is with its own; there is no intercept; the weight decay is 0.0025 / images
of the bank; and the short side of an image is all seen, resized bilinearly. It sees the measured
images as one set, so its figures compare with that paper's only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from pospre import draws
from pospre.data.stores.subset import subset
from pospre.data.views.options import ViewGroup
from pospre.evaluation.classification.vectors import Part, encode_parts
from pospre.evaluation.estimates import rate_error
from pospre.evaluation.features import Pooling, check_enough, check_probe
from pospre.evaluation.registry import Context, Plan
from pospre.evaluation.settings import Sampling
from pospre.ranges import PositiveShare
from pospre.text_table import format_table, percent

FIGURES = {"top1": "max"}
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)
_STOP_DECAY = 0.0025  # divided by the images of the bank


def evaluate(
    context: Context,
    *,
    bank: str,
    protocol: Literal["stop"] | None = None,
    features: Pooling = "mean",
    iterations: PositiveInt = 100,
    weight_decay: PositiveFloat | None = None,
    label_fraction: PositiveShare = 1.0,
    labels: str | None = None,
    num_bank: PositiveInt | None = None,
    sampling: Sampling = Sampling(),
    baseline: bool = True,
) -> dict[str, Any]:
    """Measure top-1.

    Args:
        context: model, data and device.
        bank: data set that the classifier is fitted to, for instance the training set.
        protocol: stop for StoP's (see above), to compare with its table 1; null for ours.
        features: mean of the patch tokens, or the cls token, after the encoder's final norm.
        iterations: at most so many of L-BFGS.
        weight_decay: of cross-entropy + weight_decay/2·‖weights‖²; without it the best of a few, or
            the protocol's.
        label_fraction: fit to this share of the bank, as many images of each class, drawn by the
            seed; 0.01 and 0.1 are usual.
        labels: fit to the images that this text file names, one in each line, such as a published
            list of 1 %.
        num_bank: fit to so many images of the bank, drawn by the seed; all without it.
        sampling: which images are classified, and how they are read; the seed also draws the tenth
            held back.
        baseline: measure the untrained encoder of the same recipe and seed as well.

    Returns:
        ``top1`` and ``initial_top1`` in [0, 1], and what they were measured with.

    Raises:
        UserError: an image has no label, or the images taken from the bank are of one class.
    """
    models = context.models("top1", "initial_top1", baseline=baseline)
    part: Part = (None, features)
    is_stop = protocol == "stop"
    view = _stop_view(context) if is_stop else None
    encode = partial(encode_parts, context, models, parts=[part], view=view)
    banks, bank_labels_M = encode(
        data=bank,
        title="logistic bank",
        sampling=replace(sampling, num_samples=num_bank),
        label_fraction=label_fraction,
        labels=labels,
    )
    classes = len(bank_labels_M.unique())
    check_enough(bank, len(bank_labels_M), classes)
    queries, labels_Q = encode(data=context.data, title="logistic", sampling=sampling)
    num_classes = int(torch.cat([labels_Q, bank_labels_M]).max()) + 1
    if weight_decay is None and is_stop:
        weight_decay = _STOP_DECAY / len(bank_labels_M)
    results: dict[str, Any] = {"initial_top1": None, "protocol": protocol}
    for name in models:
        bank_MD, queries_QD = (standardise_apart if is_stop else standardise)(
            banks[name][part], queries[name][part]
        )
        weights, decay = fit(
            bank_MD.to(context.device),
            bank_labels_M.to(context.device),
            num_classes,
            iterations=iterations,
            decays=DECAYS if weight_decay is None else (weight_decay,),
            seed=sampling.seed,
        )
        predicted_Q = classify(queries_QD.to(context.device), weights).cpu()
        results[name] = float((predicted_Q == labels_Q).double().mean())
        results[f"{name}_weight_decay"] = decay
    return {
        **results,
        "standard_error": rate_error(results["top1"], len(labels_Q)),
        "features": features,
        "bank_samples": len(bank_labels_M),
        "query_samples": len(labels_Q),
        "classes": classes,
        "chance": 1 / classes,
    }


def check(plan: Plan) -> None:
    """Raise a ``UserError`` for data or a bank that no classifier can be fitted to."""
    settings = plan.settings
    bank = check_probe(plan)
    bank = subset(bank, settings["label_fraction"], settings["labels"], settings["seed"])
    count = min(len(bank), settings["num_bank"] or len(bank))
    classes = count if bank.classes is None else len(bank.classes)
    check_enough(bank.address, count, classes)


def standardise(bank_MD: Tensor, queries_QD: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the bank's mean 0 and variance 1 per feature, and a 1 appended (bias)."""
    mean, deviation = bank_MD.mean(0), bank_MD.std(0).clamp_min(1e-6)
    scaled = [(part - mean) / deviation for part in (bank_MD, queries_QD)]
    first, second = (F.pad(part, (0, 1), value=1.0) for part in scaled)
    return first, second


def standardise_apart(bank_MD: Tensor, queries_QD: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, each with its own mean 0 and variance 1 per feature; there is no bias (StoP)."""
    first, second = (
        (part - part.mean(0)) / part.std(0).clamp_min(1e-6) for part in (bank_MD, queries_QD)
    )
    return first, second


def _stop_view(context: Context) -> ViewGroup:
    """Return the middle of an image with all of its short side: no area or shape is drawn."""
    return ViewGroup(
        size=context.image_size,
        scale=(1.0, 1.0),
        ratio=(1.0, 1.0),
        flip_rate=0.0,
        interpolation="bilinear",
    )


def fit(
    bank_MD: Tensor,
    labels_M: Tensor,
    num_classes: int,
    *,
    iterations: int,
    seed: int,
    decays: Sequence[float] = DECAYS,
) -> tuple[Tensor, float]:
    """Return the weights (D, C) of the best weight decay, refitted to the whole bank, and it."""
    key = draws.sample_keys(seed, 0, torch.zeros(1, dtype=torch.int64), 0, "linear/held_back")
    order = draws.permutation(key, len(bank_MD))[0].to(bank_MD.device)
    held, rest = order[: len(order) // 10], order[len(order) // 10 :]

    def accuracy(decay: float) -> float:
        weights = logistic(bank_MD[rest], labels_M[rest], num_classes, decay, iterations)
        return float((classify(bank_MD[held], weights) == labels_M[held]).double().mean())

    best = max(decays, key=accuracy) if len(decays) > 1 else decays[0]
    return logistic(bank_MD, labels_M, num_classes, best, iterations), best


def logistic(
    bank_MD: Tensor, labels_M: Tensor, num_classes: int, decay: float, iterations: int
) -> Tensor:
    """Return the weights (D, C) that minimise cross-entropy + decay/2·‖weights‖², by L-BFGS."""
    weights = bank_MD.new_zeros(bank_MD.shape[1], num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(bank_MD @ weights, labels_M) + decay / 2 * weights.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weights.detach()


def classify(queries_QD: Tensor, weights_DC: Tensor) -> Tensor:
    """Return the class (Q,) of each feature vector."""
    return (queries_QD @ weights_DC).argmax(dim=1)


def table(results: Mapping[str, Any]) -> str:
    """Return the accuracies as text, in percent."""
    rows = [["trained", percent(results["top1"])]]
    if results["initial_top1"] is not None:
        rows.append(["untrained", percent(results["initial_top1"])])
    rows.append(["chance", percent(results["chance"])])
    notes = [
        f"logistic regression on standardised {results['features']} features, weight decay "
        f"{results['top1_weight_decay']:g}",
        f"{results['query_samples']} images of {results['classes']} classes (standard error "
        f"{percent(results['standard_error'])}); fitted to {results['bank_samples']} of the bank",
    ]
    whose = "StoP's protocol" if results["protocol"] == "stop" else "not the papers' protocol"
    title = f"Accuracy in % of logistic regression on one centre view ({whose})"
    return format_table(title, ["encoder", "top-1"], rows, notes)
