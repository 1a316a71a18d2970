"""Accuracy of the class head of a supervised run.

Top-1 and top-5 on held-out images, centre views. An untrained head would be at chance.
``ensemble=RUN`` averages the class probabilities with those of other fine-tuned models (Zhai et al.
2022, for MP3 and MAE).
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from pospre.algorithms.supervised.supervised import Classification
from pospre.batch import Batch
from pospre.data.stores.description import first_other
from pospre.errors import UserError
from pospre.evaluation.classification.class_sets import HeadClasses, match_classes
from pospre.evaluation.classification.settings import Accuracy
from pospre.evaluation.estimates import rate_error
from pospre.evaluation.features import centre_batches
from pospre.evaluation.registry import Context, Plan
from pospre.model.algorithm import method_of
from pospre.model.model import PretrainModel
from pospre.nn.places import Places
from pospre.nn.sizes import pair
from pospre.recipe.recipe import Recipe
from pospre.training.build import load_model

NEEDS = Classification
FIGURES = {"top1": "max", "top5": "max"}


def evaluate(context: Context, settings: Accuracy) -> dict[str, Any]:
    """Measure top-1 and top-5.

    Returns:
        ``top1`` and ``top5`` in [0, 1] (``top5`` is None with five classes or fewer); the
        ``standard_error`` of ``top1``; ``members`` (``top1`` of each model of an ensemble alone,
        the measured one first).
    """
    num_classes = class_head(context.model).num_classes
    classes, others = context.opened
    members = [context.model, *(member.to(context.device) for member in others)]
    check_distinct(["the measured model", *settings.ensemble], members)
    batches = centre_batches(context, settings)
    ranks: list[Tensor] = []
    for batch in batches:
        label_B = classes.numbers(batch["label"], context.data)
        each = [log_probabilities(member, member.images(batch)[:, 0], batch) for member in members]
        answers = [torch.stack(each).logsumexp(0), *each]  # of the mean probability, up to 1/n
        ranks.append(torch.stack([rank_of(scores, label_B) for scores in answers]).cpu())
    together_M, *alone_NM = torch.cat(ranks, dim=1)
    top1 = _share(together_M < 1)
    return {
        "top1": top1,
        "top5": _share(together_M < 5) if num_classes > 5 else None,
        "standard_error": rate_error(top1, len(together_M)),
        "members": [_share(own_M < 1) for own_M in alone_NM] if settings.ensemble else None,
        "samples": len(together_M),
        "classes": num_classes,
        "chance": 1 / num_classes,
    }


def _share(right_M: Tensor) -> float:
    return float(right_M.double().mean())


def check(plan: Plan[Accuracy]) -> tuple[HeadClasses, list[PretrainModel]]:
    """Return the classes and the ensemble; ``UserError`` for data without labels or of others."""
    classes = match_classes(plan)
    return classes, load_classifiers(plan.settings.ensemble, classes.names, plan.recipe)


def missing(plan: Plan[Accuracy], opened: tuple[HeadClasses, Any]) -> dict[str, str]:
    """Return why there is no top-5, if there is none."""
    count = len(opened[0].names)
    why = f"of {count} classes the true one is always among five; use accuracy/top1"
    return {"top5": why} if count <= 5 else {}


def rank_of(logits_BC: Tensor, label_B: Tensor) -> Tensor:
    """Return the number of classes ranked before the true one, (B,); ties count as before."""
    own = logits_BC.gather(1, label_B[:, None])
    others = torch.ones_like(logits_BC, dtype=torch.bool).scatter_(1, label_B[:, None], False)
    return ((logits_BC >= own) & others).sum(1)


def class_head(model: PretrainModel) -> Classification:
    """Return the class head of a model."""
    return model.objectives.of(Classification)


@torch.no_grad()
def log_probabilities(
    model: PretrainModel, images_BCHW: Tensor, batch: Batch, places: Places | None = None
) -> Tensor:
    """Return the logarithms of the class probabilities (B, C), float32."""
    tokens = model.encoder(images_BCHW, places=places)
    logits: Tensor = class_head(model)({"student": tokens}, batch)["logits"]
    return logits.float().log_softmax(-1)


def check_distinct(names: Sequence[str], models: Sequence[PretrainModel]) -> None:
    """Raise a ``UserError`` if two models have the same weights."""
    pairs = zip(names, (model.state_dict() for model in models), strict=True)
    for (name, one), (other, two) in combinations(pairs, 2):
        if one.keys() == two.keys() and all(torch.equal(one[each], two[each]) for each in one):
            raise UserError(
                f"ensemble={other} has the same weights as {name}; give separately trained runs, "
                "such as with other seeds."
            )


def load_classifiers(
    uris: Sequence[str], names: Sequence[str], measured: Recipe
) -> list[PretrainModel]:
    """Return further fine-tuned models, in eval mode on the CPU.

    All must fit the measured one, of this recipe, with classes of these names.
    """
    models, size = [], pair(measured.encoder.image_size)
    for uri in uris:
        model, recipe = load_model(uri)
        if method_of(recipe.algorithms, Classification) is None:
            raise UserError(
                f"ensemble={uri} was trained with {', '.join(recipe.algorithms)} and has no "
                "class head; give a run of algorithms.supervised."
            )
        theirs = class_head(model).num_classes, model.encoder.image_size
        if theirs != (len(names), size):
            raise UserError(
                f"ensemble={uri} has {theirs[0]} classes and images of {list(theirs[1])} pixels, "
                f"the measured model {len(names)} and {list(size)}; they must agree."
            )
        own, others = measured.trained_on.classes, recipe.trained_on.classes
        if own and others and own != others:
            raise UserError(
                f"ensemble={uri} was trained on other classes than the measured model (first "
                f"difference: {first_other(own, others)}); give runs of the same classes."
            )
        models.append(model)
    return models
