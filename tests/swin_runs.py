"""Recipes of a Swin that is small in pixels: 4×4 patches, maps of 16 to 2 tokens a side."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def two_images(seed: int) -> dict[str, Tensor]:
    """Return a batch of two images of 128 × 128 random pixels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 1, 3, 128, 128)
    return {
        "view/image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        "view/flip": torch.zeros(2, 1, dtype=torch.bool),
        "index": torch.arange(2),
        "epoch": torch.zeros(2, dtype=torch.int64),
    }


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
