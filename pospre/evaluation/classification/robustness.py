"""Accuracy of a fine-tuned classifier on corrupted images, other positions and other data sets.

Corruptions of ``data``: a painted box, painted patches, shuffled tiles, and shifted or stretched
positions (Kim et al. 2024, table 5, has the box in the centre). Further data sets: ImageNet-V2, -A,
-R and -Sketch by their folders, and SI-Score or ObjectNet by a list of classes. ``outliers``
(ImageNet-O) gives the area under the precision-recall curve of detecting outliers by the maximal
probability. ImageNet-O's folders have the names of the 200 classes that its images are mistaken
for. Only these classes and their images are then used, as in Hendrycks et al. 2021. Otherwise the
share of outliers, which is the chance level, would be a quarter of that.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pospre.algorithms.supervised.supervised import Classification
from pospre.batch import INDEX, LABEL
from pospre.data.opening import open_reader
from pospre.errors import UserError, needing
from pospre.evaluation.classification.accuracy import log_probabilities
from pospre.evaluation.classification.class_sets import (
    ClassSet,
    check_labels,
    match_classes,
    open_class_set,
    outlier_classes,
    read_reassessed,
)
from pospre.evaluation.classification.robustness_conditions import Condition, conditions
from pospre.evaluation.classification.settings import Robustness
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.estimates import rate_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.layers import blank_encoder
from pospre.evaluation.registry import Context, Plan
from pospre.nn.masking import num_visible
from pospre.nn.sizes import pair

NEEDS = Classification
FIGURES = {"mean": "max"}


def evaluate(context: Context, settings: Robustness) -> dict[str, Any]:
    """Measure top-1 under every condition and on every further data set.

    Returns:
        ``conditions`` and ``sets``: one dict each with ``name``, ``top1`` in [0, 1],
        ``standard_error``, ``images`` and the number of possible ``classes``; ``clean``, and
        ``mean`` of all other conditions and sets; ``reassessed``, as a condition; ``outlier_aupr``.
    """
    encoder = context.model.encoder
    wanted = conditions(settings, encoder.grid, encoder.positions)
    own, others, real_MC, among_C = context.opened
    classes = len(own.possible)
    rows, clean = _measure(context, own, wanted, among_C, settings)
    further = [_measure(context, each, wanted[:1], among_C, settings)[0][0] for each in others]
    aupr = None
    if settings.outliers is not None:
        from sklearn.metrics import average_precision_score

        strange = _confidence(context, settings.outliers, settings, among_C)
        usual = clean.confidence[own.right[clean.label][:, among_C].any(1)]
        if not len(usual):
            raise UserError(f"no measured image is of a class of outliers={settings.outliers}.")
        truth = [0] * len(usual) + [1] * len(strange)
        scores = -torch.cat([usual, strange])
        aupr = float(average_precision_score(truth, scores.numpy()))
    real = None
    if real_MC is not None:
        right_MC = real_MC[clean.sample]
        some_M = right_MC.any(1)
        right_M = right_MC.gather(1, clean.answer[:, None])[:, 0][some_M]
        real = _row("reassessed labels", right_M, classes) if len(right_M) else None
    rest = [row["top1"] for row in [*rows[1:], *further]]
    return {
        "clean": rows[0]["top1"],
        "mean": sum(rest) / len(rest),
        "conditions": rows,
        "sets": [{**row, "name": set_.path} for row, set_ in zip(further, others, strict=True)],
        "reassessed": real,
        "outlier_aupr": aupr,
    }


def check(plan: Plan[Robustness]) -> tuple[ClassSet, list[ClassSet], Tensor | None, Tensor]:
    """Return the measured set, further ones, classes of reassessed images, and of outliers."""
    settings = plan.settings
    known, of_label = match_classes(plan)
    every = torch.eye(len(known)).bool()
    own = ClassSet(plan.data, every if of_label is None else every[of_label], every.any(0))
    reader = open_reader(plan.data)
    size = pair(plan.recipe.encoder.image_size)
    for count in settings.tiles:
        if size[0] % count or size[1] % count:
            raise UserError(
                f"tiles={count} does not divide images of {size[0]} x {size[1]} pixels."
            )
    encoder = blank_encoder(plan.recipe)
    if settings.shift >= max(2, *encoder.grid):
        raise UserError(
            f"shift={settings.shift} wraps around the grid of {encoder.grid[0]} x "
            f"{encoder.grid[1]} patches; give less than {max(encoder.grid)}."
        )
    for ratio in settings.patch_drop:
        num_visible(encoder.num_patches, ratio, key="patch_drop")
    if settings.outliers is not None:
        with needing("evaluate", "robustness outliers=…"):
            import sklearn.metrics  # noqa: F401
        if open_reader(settings.outliers).address == reader.address:
            raise UserError(
                f"outliers={settings.outliers} is the measured data itself; give images of other "
                "classes."
            )
    if settings.lists is not None and not settings.sets:
        raise UserError(
            f"lists={settings.lists} maps the folders of sets to classes; give sets=PATH as well."
        )
    path = settings.reassessed
    sets = [open_class_set(each, known, settings.lists) for each in settings.sets]
    among = outlier_classes(settings.outliers, known)
    real = None if path is None else read_reassessed(path, reader, len(known))
    return own, sets, real, among


class Clean(NamedTuple):
    """Predictions for clean images, (M,): index, true and predicted class, and ``confidence``."""

    sample: Tensor
    label: Tensor
    answer: Tensor
    confidence: Tensor


def _measure(
    context: Context, data: ClassSet, wanted: list[Condition], among_C: Tensor, sampling: Sampling
) -> tuple[list[dict[str, Any]], Clean]:
    """Return a row per condition, and the predictions for the clean images."""
    model, right_LC = context.model, data.right.to(context.device)
    impossible_C = ~data.possible.to(context.device)
    hits: list[Tensor] = []
    clean: list[Clean] = []
    for batch in centre_batches(context, sampling, data.path):
        label_B = batch[LABEL]
        check_labels(label_B, len(right_LC), data.path)
        images = model.images(batch)[:, 0]
        right: list[Tensor] = []
        for _, change, move in wanted:
            seen = images if change is None else change(images, batch, sampling.seed)
            whole = model.encoder.places_of(seen)
            places = None if move is None else move(whole, seen.device)
            scores_BC = log_probabilities(model, seen, batch, places)
            answer_B = scores_BC.masked_fill(impossible_C, -torch.inf).argmax(1)
            if not right:
                sure_B = confidence(scores_BC.cpu(), among_C)
                clean.append(Clean(batch[INDEX].cpu(), label_B.cpu(), answer_B.cpu(), sure_B))
            right.append(right_LC[label_B, answer_B])
        hits.append(torch.stack(right).cpu())
    pairs = zip(wanted, torch.cat(hits, dim=1), strict=True)
    rows = [_row(condition.name, hit_M, int(data.possible.sum())) for condition, hit_M in pairs]
    return rows, Clean(*(torch.cat(parts) for parts in zip(*clean, strict=True)))


def _row(name: str, hit_M: Tensor, classes: int) -> dict[str, Any]:
    top1 = float(hit_M.double().mean())
    return {
        "name": name,
        "top1": top1,
        "standard_error": rate_error(top1, len(hit_M)),
        "images": len(hit_M),
        "classes": classes,
    }


def confidence(scores_MC: Tensor, among_C: Tensor) -> Tensor:
    """Return the logarithm of the maximal probability (M,) among some classes."""
    return scores_MC[:, among_C].log_softmax(1).amax(1)


def _confidence(context: Context, data: str, sampling: Sampling, among_C: Tensor) -> Tensor:
    """Return the ``confidence`` (M,) of every image."""
    model, parts = context.model, []
    for batch in centre_batches(context, sampling, data):
        scores_BC = log_probabilities(model, model.images(batch)[:, 0], batch).cpu()
        parts.append(confidence(scores_BC, among_C))
    return torch.cat(parts)
