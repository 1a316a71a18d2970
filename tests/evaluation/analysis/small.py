"""A small recipe to analyse, and a look at what was drawn."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pospre.recipe.recipe import Recipe, recipe_from_dict

Analyse = Callable[..., dict[str, Any]]
MAE = {"mae": {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}}
IJEPA = {"predictor_dim": 32, "predictor_depth": 1, "predictor_heads": 2}


def small_recipe(algorithms: Mapping[str, Any] = MAE, **encoder: Any) -> Recipe:
    """Return a recipe of two narrow blocks on 4 × 4 patches."""
    size = {"name": "speech8", "image_size": 32, "patch_size": 8, "depth": 2}
    return recipe_from_dict(
        {
            "run_name": "small",
            "data": {"path": "unused", "batch_size": 4},
            "encoder": {**size, "positions": "learned", **encoder},
            "algorithms": dict(algorithms),
            "trainer": {"max_duration": "1ep"},
        }
    )


def require_drawn(path: Path) -> None:
    """Fail unless a picture has a size that can be read, and many colours."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30
