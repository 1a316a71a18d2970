"""Logistic regression on frozen features: a quick comparison of encoders, or StoP's 1 % protocol.

A linear classifier is fitted to the pooled features of a labelled bank and measured on other
images. Features are standardised with the bank's statistics. The weight decay is the best of a few
on a held-out tenth of the bank. There is no augmentation and no randomness. Most papers train a
layer for tens of epochs on random crops, so their figures differ.

``protocol=stop`` is the protocol of StoP's published code for I-JEPA and StoP on 1 % of ImageNet's
labels (Bar et al. 2024, ``logistic_eval.py``). Measured images are standardised with their own
statistics, as the bank is with its own. There is no intercept, and the weight decay is 0.0025
divided by the number of bank images. The whole short side of an image is used, resized bilinearly.
It uses the measured images as one set, so its figures only compare with that paper's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre import draws
from pospre.data.stores.subset import subset
from pospre.data.views.options import ViewGroup
from pospre.evaluation.classification.settings import Logistic
from pospre.evaluation.estimates import compared, rate_error
from pospre.evaluation.features import Part, check_enough, check_probe, encode_parts
from pospre.evaluation.registry import Context, Plan

FIGURES = {"top1": "max"}
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)
_STOP_DECAY = 0.0025  # divided by the number of bank images


def evaluate(context: Context, settings: Logistic) -> dict[str, Any]:
    """Measure top-1.

    Returns:
        ``top1`` and ``initial_top1`` in [0, 1], and their weight decays; the ``standard_error`` of
        ``top1``; their ``top1_difference`` with its paired error.
    """
    models = context.models(baseline=settings.baseline)
    part: Part = (None, settings.features)
    is_stop = settings.protocol == "stop"
    view = _stop_view(context) if is_stop else None
    encode = partial(encode_parts, context, models, [part], view=view)
    banks, bank_labels_M = encode(
        settings.model_copy(update={"num_samples": settings.num_bank}),
        settings.bank,
        label_fraction=settings.label_fraction,
        labels=settings.labels,
    )
    classes = len(bank_labels_M.unique())
    check_enough(settings.bank, len(bank_labels_M), classes)
    queries, labels_Q = encode(settings)
    num_classes = int(torch.cat([labels_Q, bank_labels_M]).max()) + 1
    weight_decay = settings.weight_decay
    if weight_decay is None and is_stop:
        weight_decay = _STOP_DECAY / len(bank_labels_M)
    right: dict[str, Tensor] = {}
    decays: dict[str, float] = {}
    for prefix in models:
        bank_MD, queries_QD = (standardise_apart if is_stop else standardise)(
            banks[prefix][part], queries[prefix][part]
        )
        weights, decays[f"{prefix}top1_weight_decay"] = fit(
            bank_MD.to(context.device),
            bank_labels_M.to(context.device),
            num_classes,
            iterations=settings.iterations,
            decays=DECAYS if weight_decay is None else (weight_decay,),
            seed=settings.seed,
        )
        predicted_Q = classify(queries_QD.to(context.device), weights).cpu()
        right[prefix] = predicted_Q == labels_Q
    results = compared("top1", right)
    return {
        **results,
        **decays,
        "standard_error": rate_error(results["top1"], len(labels_Q)),
        "bank_samples": len(bank_labels_M),
        "query_samples": len(labels_Q),
        "classes": classes,
        "chance": 1 / classes,
    }


def check(plan: Plan[Logistic]) -> None:
    """Raise a ``UserError`` for data or a bank that no classifier can be fitted to."""
    settings = plan.settings
    bank = check_probe(plan)
    bank = subset(bank, settings.label_fraction, settings.labels, settings.seed)
    count = min(len(bank), settings.num_bank or len(bank))
    classes = count if bank.classes is None else len(bank.classes)
    check_enough(bank.address, count, classes)


def standardise(bank_MD: Tensor, queries_QD: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise both with the bank's statistics per feature, and append a 1 (bias)."""
    mean, deviation = bank_MD.mean(0), bank_MD.std(0).clamp_min(1e-6)
    scaled = [(part - mean) / deviation for part in (bank_MD, queries_QD)]
    first, second = (F.pad(part, (0, 1), value=1.0) for part in scaled)
    return first, second


def standardise_apart(bank_MD: Tensor, queries_QD: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise each with its own statistics per feature, without bias (StoP)."""
    first, second = (
        (part - part.mean(0)) / part.std(0).clamp_min(1e-6) for part in (bank_MD, queries_QD)
    )
    return first, second


def _stop_view(context: Context) -> ViewGroup:
    """Return the centre view with the whole short side, without random area or shape."""
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
    """Return the weights (D, C) with the best weight decay, refitted to the whole bank, and it."""
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
