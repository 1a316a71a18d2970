"""Linear probes as published: classifiers trained by gradient descent on frozen features.

``protocol`` is ``mae`` (LARS, batch norm, 90 epochs), ``dinov2`` (a grid of rates over the last and
the last four blocks) or ``vissl`` (I-JEPA and StoP: SGD in steps, last and last four blocks).
``heads.py`` has the values and the sources. If several classifiers are trained, the reported one is
chosen on a held-out tenth of the bank. The best on the measured images is given as well, as
DINOv2's code reports it. By default classifiers are trained on features of centre views. With
``augment=true`` they get new random crops and flips in every epoch, as in the papers, which encodes
the bank once per epoch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pospre import draws
from pospre.data.stores.subset import subset
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.evaluation.classification.heads import (
    PROTOCOLS,
    Features,
    Kind,
    Protocol,
    classify,
    kinds_of,
    train_heads,
)
from pospre.evaluation.classification.settings import Linear
from pospre.evaluation.estimates import compared, rate_error
from pospre.evaluation.features import Parts, check_enough, check_probe, encode_parts
from pospre.evaluation.layers import planned_encoder
from pospre.evaluation.registry import UNTRAINED, Context, Plan
from pospre.model.model import PretrainModel

FIGURES = {"top1": "max"}


def evaluate(context: Context, settings: Linear) -> dict[str, Any]:
    """Measure top-1.

    Returns:
        ``top1`` and ``initial_top1`` in [0, 1] of the chosen classifier; ``standard_error`` of
        ``top1``; their ``top1_difference`` with its paired error; ``best_top1`` (chosen on the
        measured images); ``features`` (one dict per kind of features, with the classifier chosen);
        the protocol's values used.
    """
    given = settings.values("epochs", "batch", "base_lr")
    published = adjusted(PROTOCOLS[settings.protocol], given)
    depth = context.model.encoder.depth
    kinds = kinds_of(published, settings.features or published.pooling, depth)
    models = context.models(baseline=settings.baseline)
    encode = partial(
        encode_parts,
        context,
        parts=sorted({part for kind in kinds for part in kind.features.parts}),
    )
    from_bank = partial(
        encode,
        data=settings.bank,
        sampling=settings.model_copy(update={"num_samples": None}),
        label_fraction=settings.label_fraction,
        labels=settings.labels,
    )
    view = _view(context, crop="full", flip_rate=0.0) if published.crop == "full" else None
    seen, label_M = from_bank(models, view=view)
    queries, label_Q = encode(models, sampling=settings, view=view)
    rest, held = _split(len(label_M), settings.seed, hold_back=len(kinds) > 1)
    cut = _view(context, scale=(0.08, 1.0)) if view is None else _view(context, crop="full")
    crops = partial(from_bank, view=cut) if settings.augment else None
    measured: dict[str, list[Measured]] = {}
    for prefix, model in models.items():
        of_epoch = partial(_of_epoch, model, _rows(seen[prefix], rest), crops, rest)
        heads = train_heads(
            kinds,
            published,
            map(of_epoch, context.track(range(published.epochs), "linear heads", unit="ep")),
            label_M[rest],
            int(torch.cat([label_M, label_Q]).max()) + 1,
            dim=model.encoder.embed_dim,
            seed=settings.seed,
            device=context.device,
        )
        if not any(bool(torch.isfinite(head.linear.weight).all()) for head in heads):
            raise UserError("no classifier's weights are finite; lower base_lr=…")
        for head in heads:
            right_H = classify(head, _rows(seen[prefix], held), context.device) == label_M[held]
            right_Q = classify(head, queries[prefix], context.device) == label_Q
            on_held = float(right_H.double().mean()) if len(held) else None
            measured.setdefault(prefix, []).append(Measured(head.kind, on_held, right_Q))
    classes = len(label_M.unique())
    return {
        **summarise(measured),
        "epochs": published.epochs,
        "batch": min(published.batch, len(rest)),
        "classifiers": len(kinds),
        "bank_samples": len(label_M),
        "held_back": len(held),
        "query_samples": len(label_Q),
        "classes": classes,
        "chance": 1 / classes,
    }


def adjusted(protocol: Protocol, given: Mapping[str, Any]) -> Protocol:
    """Return a protocol with given ``epochs``, ``batch`` and ``base_lr`` replaced."""
    changed = {key: value for key, value in given.items() if value is not None}
    if "base_lr" in changed:
        changed["base_lrs"] = (changed.pop("base_lr"),)
    shrunk = changed.get("epochs", protocol.epochs) / protocol.epochs
    return replace(
        protocol,
        **changed,
        warmup=protocol.warmup * shrunk,
        milestones=tuple(epoch * shrunk for epoch in protocol.milestones),
    )


def check(plan: Plan[Linear]) -> None:
    """Raise a ``UserError`` if classifiers cannot be trained with this data, bank or encoder."""
    settings = plan.settings
    protocol = PROTOCOLS[settings.protocol]
    pooling = settings.features or protocol.pooling
    depth, wanted = planned_encoder(plan.recipe).depth, max(protocol.blocks)
    bank = check_probe(replace(plan, settings=settings.model_copy(update={"features": pooling})))
    if depth < wanted:
        raise UserError(
            f"protocol={settings.protocol} uses the last {wanted} blocks, but the encoder has "
            f"{depth}; use protocol=mae, or logistic."
        )
    chosen = subset(bank, settings.label_fraction, settings.labels, settings.seed)
    classes = len(chosen if bank.classes is None else bank.classes)
    check_enough(bank.address, len(chosen), classes)


def _of_epoch(
    model: PretrainModel,
    own: Parts,
    crops: Callable[..., tuple[dict[str, Parts], Tensor]] | None,
    rest: Tensor,
    epoch: int,
) -> Parts:
    """Return a model's vectors for an epoch: of random crops of the bank, or else ``own``."""
    if crops is None:
        return own
    features, _ = crops({"": model}, epoch=epoch)
    return _rows(features[""], rest)


def _view(context: Context, **options: Any) -> ViewGroup:
    return ViewGroup(size=context.image_size, **options)


def _split(count: int, seed: int, *, hold_back: bool) -> tuple[Tensor, Tensor]:
    """Return the images to train on, and those to choose the classifier on."""
    key = draws.sample_keys(seed, 0, torch.zeros(1, dtype=torch.int64), 0, "linear/choice")
    order = draws.permutation(key, count)[0]
    held = count // 10 if hold_back else 0
    return order[held:].sort().values, order[:held].sort().values


def _rows(vectors: Parts, rows: Tensor) -> Parts:
    return {part: values[rows] for part, values in vectors.items()}


class Measured(NamedTuple):
    """A classifier, and what it was measured on.

    Attributes:
        kind: how it was trained.
        held: accuracy on images held back; None: it is the only one.
        right: bool (Q,), the measured images that it classifies right.
    """

    kind: Kind
    held: float | None
    right: Tensor

    @property
    def top1(self) -> float:
        """Accuracy on the measured images."""
        return float(self.right.double().mean())


def summarise(measured: Mapping[str, list[Measured]]) -> dict[str, Any]:
    """Choose among each model's classifiers, by prefix; see ``evaluate`` for the result."""

    def chosen(heads: list[Measured]) -> Measured:
        return max(heads, key=lambda head: -1.0 if head.held is None else head.held)

    results = compared("top1", {prefix: chosen(heads).right for prefix, heads in measured.items()})
    by_features: dict[Features, list[Measured]] = {}
    for head in measured[""]:
        by_features.setdefault(head.kind.features, []).append(head)
    rows = []
    for features, heads in by_features.items():
        best = chosen(heads)
        others = [head for head in measured.get(UNTRAINED, ()) if head.kind.features == features]
        rows.append(
            {
                "features": str(features),
                "norm": best.kind.norm,
                "base_lr": best.kind.base_lr,
                "held_back_top1": best.held,
                "top1": best.top1,
                "best_top1": max(head.top1 for head in heads),
                "initial_top1": chosen(others).top1 if others else None,
            }
        )
    return {
        **results,
        "standard_error": rate_error(results["top1"], len(measured[""][0].right)),
        "best_top1": max(head.top1 for head in measured[""]),
        "features": rows,
    }
