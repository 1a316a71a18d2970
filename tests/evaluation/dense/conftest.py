"""A small model for the dense evaluations."""

from collections.abc import Callable
from typing import Any

import pytest

from pospre.recipe.recipe import Recipe
from tests.evaluation.checkpoints import results_of, tiny_recipe

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="package")
def dense_recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Return a recipe of one block on patches of 8 in images of 32."""
    runs = tmp_path_factory.mktemp("runs")
    return tiny_recipe(runs, "mae", image_size=32, patch_size=8, depth=1)


@pytest.fixture(scope="package")
def measure(dense_recipe: Recipe) -> Run:
    """Return ``measure(name, data, **settings)``: results of the recipe's untrained model."""
    return lambda name, data, **settings: results_of(name, dense_recipe, data, **settings)
