"""Small checkpoints as training writes them, without training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from composer.core import Timestamp

from pospre.data.stores.description import Identity
from pospre.evaluation.registry import figures_of
from pospre.evaluation.results_table import results_table
from pospre.evaluation.run import run_evaluation
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe, recipe_from_dict
from pospre.training.build import build_model, load_model
from tests.run.checkpoints.checkpoint_files import CONTENT, write_checkpoint


def tiny_recipe(run_folder: Path, *algorithms: str | dict[str, Any], **encoder: Any) -> Recipe:
    """Return a recipe of a two-block ViT on 4×4 patches; named algorithms have narrow decoders."""
    narrow = {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
    given = [{each: narrow} if isinstance(each, str) else each for each in algorithms]
    return recipe_from_dict(
        {
            "run_name": "tiny",
            "data": {"path": "unused", "batch_size": 4},
            "encoder": {"name": "vit_tiny16", "image_size": 64, "depth": 2, **encoder},
            "algorithms": {name: options for each in given for name, options in each.items()},
            "trainer": {"max_duration": "1ep", "run_folder": str(run_folder)},
        }
    )


def save_checkpoint(
    recipe: Recipe,
    *,
    weight_seed: int = 1,
    classes: Sequence[str] | None = None,
    identity: Identity | None = None,
) -> Path:
    """Write a run folder with one checkpoint of other weights than the initial ones.

    ``classes`` and ``identity`` are what it notes of its training data.
    """
    model = build_model(recipe)
    generator = torch.Generator().manual_seed(weight_seed)
    weights = {
        key: value
        + (not key.startswith("augment.")) * 0.05 * torch.randn(value.shape, generator=generator)
        for key, value in model.state_dict().items()
    }
    record = {
        "recipe": recipe.dump(),
        "num_samples": 8,
        "data": identity or {},
        "fingerprints": {},
        "starts": [],
        "fresh": [],
        "classes": classes and [*classes],
        "reference": None,
    }
    run = recipe.run_path()
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))
    path = run / "checkpoints" / "ep1-ba2"
    timestamp = {"Timestamp": Timestamp(batch=2).state_dict()}
    state = {"model": weights, "callbacks": {"RecipeRecord": record}, "timestamp": timestamp}
    write_checkpoint({**CONTENT, "state": {**CONTENT["state"], **state}}, path)
    return path


def results_of(
    name: str,
    recipe: Recipe,
    data: Path,
    output: Path | None = None,
    model: PretrainModel | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return the results of evaluation ``name``, by default of a recipe's untrained model."""
    model = build_model(recipe) if model is None else model
    document = run_evaluation(name, model, recipe, data, settings, output, progress=False)
    results: dict[str, Any] = document["results"]
    assert {*figures_of(name)} <= {*results} and results_table(name, results)
    return results


def measured(name: str, checkpoint: Path, data: Path, **settings: Any) -> dict[str, Any]:
    """Return the results of evaluation ``name`` of a checkpoint."""
    model, recipe = load_model(str(checkpoint))
    return results_of(name, recipe, data, model=model, **settings)


def printed_model(lines: list[str]) -> Any:
    """Run the lines that ``pospre.export`` prints, as a user would; return ``model``."""
    scope: dict[str, Any] = {}
    first = next(place for place, line in enumerate(lines) if line.startswith("import "))
    exec("\n".join(lines[first:]), scope)
    return scope["model"].eval()
