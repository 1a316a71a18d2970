"""Stores in every checkpoint what it is a checkpoint of."""

from typing import Any

from composer.core import Callback

from pospre.recipe.recipe import Recipe


class RecipeRecord(Callback):
    """The resolved recipe and the size of the data set, kept with the training state."""

    def __init__(self, recipe: Recipe, num_samples: int) -> None:
        self.recipe = recipe
        self.num_samples = num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return what is stored."""
        return {"recipe": self.recipe.dump(), "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the recipe of this start: a checkpoint's own was compared with it before."""
