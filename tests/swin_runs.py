"""Recipes of a Swin that is small in pixels: 4×4 patches, maps of 16 to 2 tokens a side."""

from pathlib import Path
from typing import Any

from pospre.recipe.recipe import Recipe, recipe_from_dict

DROPPOS = {
    "sampling": "uniform",
    "position_token": "zeros",
    "temperature": None,
    "decoder_dim": 32,
    "decoder_depth": 1,
    "decoder_heads": 2,
}
SUPERVISED = {"num_classes": 5, "pooling": "mean", "head_init": 0.5}


def small_swin(
    run_folder: Path | str, name: str, options: dict[str, Any], **encoder: Any
) -> Recipe:
    """Return a recipe of the algorithm ``name`` on Swin-T at 64 pixels, windows of 4 tokens."""
    needs = {"positions": "relative", "class_token": False, "init": "trunc_normal"}
    return recipe_from_dict(
        {
            "run_name": f"swin_{name}",
            "data": {"path": "unused", "batch_size": 2},
            "encoder": {"name": "swin_tiny", "image_size": 64, "window": 4, **needs, **encoder},
            "algorithms": {name: options},
            "trainer": {"max_duration": "1ep", "run_folder": str(run_folder)},
        }
    )
