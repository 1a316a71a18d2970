"""Stores in every checkpoint what it is a checkpoint of."""

from typing import Any

from composer.core import Callback

from pospre.data.stores.identity import Identity
from pospre.recipe.environment import COMPARED, fingerprint
from pospre.recipe.recipe import Recipe


class RecipeRecord(Callback):
    """The resolved recipe and the identity of the data set, kept with the training state.

    Of what the environment gave, and a resumed run may not change, there are fingerprints.
    """

    def __init__(self, recipe: Recipe, num_samples: int, data: Identity) -> None:
        self.num_samples = num_samples
        self.data = data
        self.recipe = recipe.record()
        self.fingerprints = {
            key: fingerprint(recipe.run_name, key, recipe.environment[key].value)
            for key in COMPARED
            if key in recipe.environment
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is stored."""
        return {
            "recipe": self.recipe,
            "num_samples": self.num_samples,
            "data": self.data,
            "fingerprints": self.fingerprints,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the recipe of this start: a checkpoint's own was compared with it before."""
