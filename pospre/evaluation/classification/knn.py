"""Nearest-neighbour classification of frozen features (Wu et al. 2018; k=20, T=0.07 as in DINO).

Every query is compared with a bank of labelled images by cosine similarity. Its k nearest
neighbours vote for their class with weight exp(similarity / T). Without a bank, the data set is its
own, and each image is classified by the others. Nothing is trained. ``layers=all`` measures the
output of every block (Zhai et al. 2022, Fig. 9; the η of that figure is the run's).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.classification.settings import Knn
from pospre.evaluation.estimates import compared, rate_error
from pospre.evaluation.features import Part, check_probe, count_images, encode_parts
from pospre.evaluation.layers import chosen_layers, planned_encoder
from pospre.evaluation.registry import Context, Plan

FIGURES = {"top1": "max"}
SIMILARITIES_AT_ONCE = 2**25  # 128 MiB of float32


def evaluate(context: Context, settings: Knn) -> dict[str, Any]:
    """Measure top-1.

    Returns:
        ``top1`` and ``initial_top1`` in [0, 1] of the last layer measured, the ``standard_error``
        of ``top1``, their ``top1_difference`` with its paired error, the same for each of
        ``layers``, and the settings used.
    """
    models = context.models(baseline=settings.baseline)
    depth = context.model.encoder.depth
    layers = [None] if settings.layers is None else chosen_layers(settings.layers, depth)
    parts: list[Part] = [(layer, settings.features) for layer in layers]
    encode = partial(encode_parts, context, models, parts)
    queries, labels_Q = encode(settings)
    banks, bank_labels_M = queries, labels_Q
    if settings.bank is not None:
        sampling = settings.model_copy(update={"num_samples": settings.num_bank})
        banks, bank_labels_M = encode(sampling, settings.bank)
    answerable_Q = _answerable(labels_Q, bank_labels_M, context.data, settings.bank)
    asked = int(answerable_Q.sum())
    rows = []
    for part in parts:
        right: dict[str, Tensor] = {}
        for prefix in models:
            predicted_Q = nearest_class(
                queries[prefix][part].to(context.device),
                banks[prefix][part].to(context.device),
                bank_labels_M.to(context.device),
                k=settings.k,
                temperature=settings.temperature,
                leave_one_out=settings.bank is None,
            )
            right[prefix] = (predicted_Q.cpu() == labels_Q)[answerable_Q]
        row = {"layer": part[0], **compared("top1", right)}
        rows.append({**row, "standard_error": rate_error(row["top1"], asked)})
        context.go_on()
    classes = len(bank_labels_M.unique())
    last = {key: value for key, value in rows[-1].items() if key != "layer"}
    return {
        **last,
        "layers": None if settings.layers is None else rows,
        **settings.values("k", "temperature", "features"),
        "bank_samples": len(bank_labels_M),
        "query_samples": asked,
        "left_out": int((~answerable_Q).sum()),
        "leave_one_out": settings.bank is None,
        "classes": classes,
        "chance": 1 / classes,
    }


def alarms(results: Mapping[str, Any]) -> list[str]:
    """Return a line if the weights that training started from hardly tell classes apart."""
    start, chance = results.get("start_top1"), results["chance"]
    if start is None or start >= chance + min(chance, (1 - chance) / 4):  # of two classes 62.5 %
        return []
    return [
        "the start hardly tells these classes apart: its weights may be loaded wrongly, or of no "
        f"use here (top-1 {start:.1%}, guessing {chance:.1%})"
    ]


def check(plan: Plan[Knn]) -> None:
    """Raise a ``UserError`` for unsuitable data or a bank that is unsuitable or too small."""
    layers = plan.settings.layers
    if layers is not None:
        planned_encoder(plan.recipe, layers)
    bank, k = plan.settings.bank, plan.settings.k
    wanted = plan.settings.num_samples if bank is None else plan.settings.num_bank
    if bank is None and plan.settings.num_bank is not None:
        raise UserError(
            f"num_bank={plan.settings.num_bank}, but there is no bank: give bank=PATH; or give "
            "num_samples, and each image is classified by all others."
        )
    images = len(check_probe(plan))
    if bank is None:
        images = count_images(plan.data, plan.settings.half)
    voters = min(images, wanted or images) - (bank is None)
    if voters < k:
        raise UserError(f"k={k}, but only {voters} images can vote; use k={max(1, voters)}.")


def nearest_class(
    queries_QD: Tensor,
    bank_MD: Tensor,
    labels_M: Tensor,
    *,
    k: int,
    temperature: float,
    leave_one_out: bool = False,
) -> Tensor:
    """Return the class (Q,) that the k most similar vectors of the bank vote for.

    Vectors may have any length; k is at most M. With ``leave_one_out`` the queries are the bank,
    and no vector votes for itself.
    """
    bank_MD = F.normalize(bank_MD, dim=1)
    num_classes = int(labels_M.max()) + 1
    rows = max(1, SIMILARITIES_AT_ONCE // len(bank_MD))
    predicted = []
    for start in range(0, len(queries_QD), rows):
        chunk = F.normalize(queries_QD[start : start + rows], dim=1)
        similarity = chunk @ bank_MD.T
        if leave_one_out:
            similarity.diagonal(offset=start).fill_(-torch.inf)
        nearest = similarity.topk(k, dim=1)
        # exp((s − 1)/T) gives the same votes as exp(s/T), without overflow at small T
        weights = torch.exp((nearest.values - 1) / temperature)
        votes = torch.zeros(len(chunk), num_classes, device=chunk.device)
        votes.scatter_add_(1, labels_M[nearest.indices], weights)
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def _answerable(labels_Q: Tensor, bank_labels_M: Tensor, data: str, bank: str | None) -> Tensor:
    """Return bool (Q,): queries with a voter of their own class."""
    size = int(torch.cat([labels_Q, bank_labels_M]).max()) + 1
    own = torch.bincount(bank_labels_M, minlength=size)[labels_Q] - (1 if bank is None else 0)
    answerable_Q = own > 0
    if not bool(answerable_Q.any()):
        where = (
            f"{data} holds one image per class"
            if bank is None
            else f"no class of {data} occurs in bank={bank}"
        )
        raise UserError(
            f"{where}, so no image has a neighbour of its own class and top-1 would be 0 for any "
            "encoder; give data with several images per class, or another bank=PATH."
        )
    return answerable_Q
