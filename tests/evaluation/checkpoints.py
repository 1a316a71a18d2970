"""Small checkpoints as training writes them, without training."""

from pathlib import Path
from typing import Any

import torch
import yaml

from pospre.recipe.recipe import Recipe, recipe_from_dict
from pospre.training.build import build_model

NUM_PATCHES = 16


def tiny_recipe(run_folder: Path, *algorithms: str, **encoder: Any) -> Recipe:
    """Return a recipe of a two-block ViT on 4×4 patches."""
    narrow = {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
    return recipe_from_dict(
        {
            "run_name": "tiny",
            "data": {"path": "unused", "batch_size": 4},
            "encoder": {"name": "vit_tiny16", "image_size": 64, "depth": 2, **encoder},
            "algorithms": dict.fromkeys(algorithms, narrow),
            "trainer": {"max_duration": "1ep", "run_folder": str(run_folder)},
        }
    )


def save_checkpoint(recipe: Recipe, *, weight_seed: int = 1) -> Path:
    """Write a run folder with one checkpoint of other weights than the initial ones."""
    model = build_model(recipe)
    generator = torch.Generator().manual_seed(weight_seed)
    weights = {
        key: value + 0.05 * torch.randn(value.shape, generator=generator)
        for key, value in model.state_dict().items()
    }
    record = {"recipe": recipe.dump(), "num_samples": 8}
    run = recipe.run_path()
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))
    path = run / "checkpoints" / "ep1-ba2.pt"
    torch.save({"state": {"model": weights, "callbacks": {"RecipeRecord": record}}}, path)
    return path
