"""Running an analysis on a small model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.evaluation import drawing
from pospre.evaluation.run import run_evaluation
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.evaluation.analysis.small import Analyse, require_drawn


@pytest.fixture
def analyse(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Analyse:
    """Return ``analyse(name, recipe, num_images=6, folder=True, **settings)``: the results.

    Pictures go to ``tmp_path / name``; weights are other than the initial ones.
    """
    monkeypatch.setattr(drawing, "DPI", 50)  # fewer pixels to draw

    def run(
        name: str, recipe: Recipe, *, num_images: int = 6, folder: bool = True, **settings: Any
    ) -> dict[str, Any]:
        model, generator = build_model(recipe), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        output = tmp_path / f"{name}.json" if folder else None
        data = image_folder(num_images)
        document = run_evaluation(name, model, recipe, data, settings, output, progress=False)
        if folder:
            for picture in document["results"]["pictures"]:
                require_drawn(tmp_path / name / picture)
            assert document["results"]["pictures"]
        results: dict[str, Any] = document["results"]
        return results

    return run
