"""Class probabilities of models that a supervised run has fine-tuned."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from pospre.algorithms.supervised.supervised import Classification
from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import method_of
from pospre.model.model import PretrainModel
from pospre.nn.places import Places
from pospre.training.trained import load_model


def class_head(model: PretrainModel) -> Classification:
    """Return the head of classes that is trained."""
    return model.objectives.find(Classification)[1]


@torch.no_grad()
def log_probabilities(
    model: PretrainModel, images_BCHW: Tensor, batch: Batch, places: Places | None = None
) -> Tensor:
    """Return the logarithms of the class probabilities (B, C), float32.

    Args:
        model: in eval mode.
        images_BCHW: normalised images.
        batch: that they are of.
        places: see ``PretrainModel.tokens``.
    """
    tokens = model.tokens(images_BCHW, places)
    logits: Tensor = class_head(model)({"student": tokens}, batch)["logits"]
    return logits.float().log_softmax(-1)


def check_distinct(names: Sequence[str], models: Sequence[PretrainModel]) -> None:
    """Raise a ``UserError`` if two models have the same weights."""
    pairs = zip(names, (model.state_dict() for model in models), strict=True)
    for (name, one), (other, two) in combinations(pairs, 2):
        if one.keys() == two.keys() and all(torch.equal(one[each], two[each]) for each in one):
            raise UserError(
                f"ensemble={other} has the very weights of {name}; give runs that were "
                "trained apart, such as with other seeds."
            )


def load_classifiers(
    uris: Sequence[str], *, num_classes: int, size: tuple[int, int]
) -> list[PretrainModel]:
    """Return further fine-tuned models, in eval mode on the CPU.

    Args:
        uris: run folders or checkpoints.
        num_classes: that each must know.
        size: height and width of the images that each must take.

    Raises:
        UserError: one cannot be read, has no class head, or another number of classes or size.
    """
    models = []
    for uri in uris:
        model, recipe = load_model(uri)
        if method_of(recipe.algorithms, Classification) is None:
            raise UserError(
                f"ensemble={uri} was trained with {', '.join(recipe.algorithms)} and has no "
                "class head; give a run of algorithms.supervised."
            )
        found = class_head(model).num_classes, model.encoder.image_size
        if found != (num_classes, size):
            raise UserError(
                f"ensemble={uri} knows {found[0]} classes of images of {list(found[1])} "
                f"pixels, the measured model {num_classes} of {list(size)}; they must agree."
            )
        models.append(model)
    return models
