"""A recipe's algorithms, and its model with them attached."""

from collections.abc import Sequence

import torch

from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.recipe.recipe import Recipe
from pospre.training.data import build_views


def build_algorithms(recipe: Recipe) -> list[PretrainAlgorithm]:
    """Return the algorithms of a resolved recipe in the order of attachment: hosts first.

    Raises:
        UserError: two of them have the same name.
    """
    by_name: dict[str, str] = {}
    made = []
    for key, given in recipe.algorithms.items():
        kind = algorithm_class(key)
        other = by_name.setdefault(kind.module_name(), key)
        if other != key:
            raise UserError(
                f"algorithms: '{other}' and '{key}' would both have the loss term "
                f"'{kind.module_name()}'. Leave one out, or give its class another name."
            )
        made.append(kind(**given))
    return sorted(made, key=lambda algorithm: not algorithm.is_host)


def build_model(recipe: Recipe) -> PretrainModel:
    """Return a resolved recipe's model with algorithms of its own attached."""
    return attached_model(recipe, build_algorithms(recipe))


def attached_model(recipe: Recipe, algorithms: Sequence[PretrainAlgorithm]) -> PretrainModel:
    """Return a resolved recipe's model with ``algorithms`` attached.

    The weights are a function of the recipe's seed: the same on every rank and at every start.

    Args:
        recipe: what to build.
        algorithms: the recipe's, made by ``build_algorithms``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return PretrainModel(
            build_encoder(**recipe.encoder.arguments()),
            algorithms,
            seed=recipe.seed,
            views=build_views(recipe),
            mean=recipe.data.mean,
            std=recipe.data.std,
        )
