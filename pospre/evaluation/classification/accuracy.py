"""Accuracy of the class head that a supervised run has trained.

Top-1 and top-5 on held-out images, centre views. What an untrained head knows is chance.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from pospre.algorithms.supervised.supervised import Classification
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.features import (
    centre_batches,
    compare_classes,
    open_labelled,
    require_labels,
)
from pospre.evaluation.registry import Context, Plan
from pospre.evaluation.table import format_table, percent

NEEDS = "supervised"
FIGURES = {"top1": "max", "top5": "max"}


def evaluate(
    context: Context,
    *,
    num_samples: PositiveInt | None = None,
    batch_size: PositiveInt = 64,
    num_workers: PositiveInt | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure top-1 and top-5.

    Args:
        context: model, data and device.
        num_samples: classify so many images, drawn by the seed; all without it.
        batch_size: images per forward pass; it does not change the result.
        num_workers: decoding threads; the loader chooses without it.
        seed: draws the images that num_samples asks for.

    Returns:
        ``top1`` and ``top5`` in [0, 1] (``top5`` is None with five classes or fewer), and what
        they were measured with.

    Raises:
        UserError: an image has no label.
    """
    head = context.model.objectives[NEEDS]
    assert isinstance(head, Classification)
    batches = centre_batches(
        context,
        context.data,
        title="accuracy",
        num_samples=num_samples,
        batch_size=batch_size,
        num_workers=num_workers,
        seed=seed,
    )
    ranks: list[Tensor] = []
    labels: list[Tensor] = []
    with torch.no_grad():
        for batch in batches:
            tokens = context.model.tokens(context.model.images(batch)[:, 0])
            logits = head({"student": tokens}, batch)["logits"].float()
            labels.append(batch["label"].cpu())
            require_labels("accuracy", labels[-1], context.data)
            require_known(labels[-1], head.num_classes, context.data)
            ranks.append(rank_of(logits, batch["label"]).cpu())
    found = torch.cat(ranks)
    return {
        "top1": float((found < 1).double().mean()),
        "top5": float((found < 5).double().mean()) if head.num_classes > 5 else None,
        "samples": len(found),
        "classes": head.num_classes,
        "chance": 1 / head.num_classes,
    }


def check(plan: Plan) -> None:
    """Raise a ``UserError`` for data without labels, or of other classes than the head's."""
    check_classes("accuracy", plan)


def check_classes(owner: str, plan: Plan) -> None:
    """Raise a ``UserError`` of evaluation ``owner`` unless the data has labels of the head's."""
    data = open_labelled(owner, plan.data)
    expected = plan.recipe.algorithms[NEEDS].get("num_classes")
    if expected is None:  # before training: those of its data
        compare_classes(owner, data, open_reader(plan.recipe.data.path))
    elif data.classes is not None and len(data.classes) != expected:
        raise UserError(
            f"{owner}: {plan.data} has {len(data.classes)} classes and the head {expected}; "
            "labels are numbers, so the data needs one folder for each class of the training data."
        )


def require_known(labels: Tensor, num_classes: int, data: str) -> None:
    """Raise a ``UserError`` if an image of ``data`` is of no class that the head knows."""
    if int(labels.max()) >= num_classes:
        raise UserError(
            f"accuracy: {data} has a label {int(labels.max())}, and the head knows {num_classes} "
            "classes, from 0; give data with the classes of the training data."
        )


def rank_of(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Return how many classes come before the true one, (B,); equal logits count as before."""
    own = logits_BC.gather(1, label_B[:, None])
    others = torch.ones_like(logits_BC, dtype=torch.bool).scatter_(1, label_B[:, None], False)
    return ((logits_BC >= own) & others).sum(1)


def table(results: Mapping[str, Any]) -> str:
    """Return the accuracies as text, in percent."""
    five = results["top5"]
    chance_five = percent(min(1.0, 5 * results["chance"]))
    rows = [
        ["trained", percent(results["top1"]), "–" if five is None else percent(five)],
        ["chance", percent(results["chance"]), "–" if five is None else chance_five],
    ]
    notes = [f"{results['samples']} images of {results['classes']} classes, centre views"]
    return format_table("Classification accuracy in %", ["head", "top-1", "top-5"], rows, notes)
