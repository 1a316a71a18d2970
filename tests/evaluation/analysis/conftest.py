"""Running an analysis on a small model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.evaluation import drawing
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.evaluation.analysis.small import Analyse, require_drawn
from tests.evaluation.checkpoints import results_of


@pytest.fixture
def analyse(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Analyse:
    """Return ``analyse(name, recipe, num_images=6, folder=True, drawn=True, **settings)``.

    It returns the results. Pictures go to ``tmp_path / name``; grids of maps are left out if not
    ``drawn``. Weights are other than the initial ones.
    """
    monkeypatch.setattr(drawing, "DPI", 50)  # fewer pixels to draw

    def run(
        name: str,
        recipe: Recipe,
        *,
        num_images: int = 6,
        folder: bool = True,
        drawn: bool = True,
        **settings: Any,
    ) -> dict[str, Any]:
        if not drawn:
            monkeypatch.setattr(drawing, "draw_cells", lambda *_, **__: None)
            monkeypatch.setattr(drawing, "save_figure", lambda figure, folder, name: name)
        model, generator = build_model(recipe), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        output = tmp_path / f"{name}.json" if folder else None
        data = image_folder(num_images)
        results = results_of(name, recipe, data, output, model, **settings)
        if folder and drawn:
            for picture in results["pictures"]:
                require_drawn(tmp_path / name / picture)
            assert results["pictures"]
        return results

    return run
