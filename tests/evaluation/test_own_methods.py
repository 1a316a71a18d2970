"""Evaluations take methods that they have never heard of, by what these declare."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from pospre.batch import VISIBLE, Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs, PixelObjective
from pospre.model.passes import ForgottenPlaces
from pospre.model.position_task import Answers, PositionObjective
from pospre.model.task_description import TaskDescription
from pospre.nn.masking import PatchMasking, slot_mask
from pospre.ranges import Ratio
from pospre.recipe.recipe import Recipe
from pospre.reporting.live_page import draw_views
from pospre.training.build import build_model
from tests.evaluation.checkpoints import results_of, tiny_recipe


class Reader(PositionObjective):
    """A linear layer that reads off where each visible patch is."""

    def __init__(self, model: PretrainModel) -> None:
        super().__init__(model.encoder)
        self.read = nn.Linear(model.encoder.embed_dim, model.encoder.num_patches)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        return {"logits": self.read(passes["student"][:, self.num_prefix :])}

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        known = batch["lost/known"]
        return Answers(outputs["logits"], batch[VISIBLE], known, ~known)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"].mT, batch[VISIBLE])


@dataclass(kw_only=True, eq=False)
class Lost(PretrainAlgorithm):
    """Half of the visible patches forget where they are."""

    objective = Reader
    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Where?", evaluation="patch_position"
    )
    mask_ratio: Ratio = 0.5

    def attach(self, model: PretrainModel) -> None:
        student = model.registry.hide("lost", self._masking(model).num_visible, shuffled=True)
        model.registry.claim("lost/known", "lost", green="patches framed in green are known")
        model.places.named["lost"] = ForgottenPlaces("lost/known", None)
        model.registry.add_pass("student", "lost", replace(student, places=("lost",)))
        model.add_objective("lost", Reader(model))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        batch.update(self._masking(model).draw(batch, model.seed))
        rows, visible = batch[VISIBLE].shape
        half = torch.arange(visible // 2, device=batch["index"].device)
        batch["lost/known"] = slot_mask(half.expand(rows, -1), visible)

    def _masking(self, model: PretrainModel) -> PatchMasking:
        return PatchMasking.by_ratio("lost", model.encoder.grid, self.mask_ratio)


class Painter(PixelObjective):
    """A linear layer that paints each hidden patch from the mean of those that are seen."""

    def __init__(self, model: PretrainModel) -> None:
        super().__init__(model.encoder)
        self.paint = nn.Linear(model.encoder.embed_dim, 16 * 16 * 3)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        mean = self.paint(passes["student"].mean(1, keepdim=True))
        target = self.target(batch)
        return {"predicted": mean.expand_as(target), "target": target}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return (outputs["predicted"] - outputs["target"]).square().mean()


@dataclass(kw_only=True, eq=False)
class Paints(PretrainAlgorithm):
    """Paints all that is hidden alike."""

    objective = Painter

    def attach(self, model: PretrainModel) -> None:
        model.registry.add_pass(
            "student", "paints", model.registry.hide("paints", 4, shuffled=True)
        )
        model.add_objective("paints", Painter(model))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        batch.update(PatchMasking(model.encoder.grid, 4).draw(batch, model.seed))


def recipe_of(folder: Path, kind: type[PretrainAlgorithm]) -> Recipe:
    return tiny_recipe(folder, {f"{__name__}:{kind.__name__}": {}}, image_size=64, depth=1)


Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(tmp_path: Path, image_folder: Callable[..., Path]) -> Measure:
    def run(name: str, kind: type[PretrainAlgorithm], **settings: Any) -> dict[str, Any]:
        recipe, output = recipe_of(tmp_path, kind), tmp_path / f"{name}.json"
        return results_of(name, recipe, image_folder(num_images=3), output, **settings)

    return run


def test_any_method_that_answers_places_is_measured(measure: Measure) -> None:
    grid = measure("position_grid", Lost)
    counts = [(cell["visible"], cell["kept"], cell["dropped"]) for cell in grid["cells"]]
    assert counts == [(16, 8, 8), (12, 6, 6), (8, 4, 4), (4, 2, 2)]
    assert {cell["position_mask_ratio"] for cell in grid["cells"]} == {0.5}
    rows = measure("patch_position", Lost, mask_ratios=[0.0, 0.5])["ratios"]
    assert [row["top1"] for row in rows] == [grid["cells"][place]["accuracy"] for place in (0, 2)]
    assert [row["context"] for row in rows] == [16, 8] and rows[0]["masked_top1"] is None
    pictures = measure("position_pictures", Lost, num_pictures=2)
    assert len(pictures["pictures"]) == 2 and pictures["position_mask_ratio"] is None


def test_any_method_that_predicts_pixels_is_drawn(measure: Measure) -> None:
    results = measure("reconstructions", Paints, num_pictures=1, mask_ratio=0.25)
    assert results["error"] > 0 and results["pictures"] == ["reconstructions.png"]


def test_pictures_of_a_step_have_its_own_caption(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, Lost)
    model = build_model(recipe).train()
    images = torch.zeros(2, 1, 3, 64, 64, dtype=torch.uint8)
    numbers = torch.arange(2)
    flip = torch.zeros(2, 1, dtype=torch.bool)
    batch = {"index": numbers, "epoch": numbers, "view/image": images, "view/flip": flip}
    draw_views(model, model.algorithms, batch, tmp_path / "views", step=1)
    (group,) = json.loads((tmp_path / "views" / "views.json").read_text())["groups"]
    assert group["legend"].endswith("; patches framed in green are known")
    strip = np.asarray(Image.open(tmp_path / "views" / group["files"][0]))
    side = strip.shape[0] // 4
    corners = strip.reshape(4, side, 4, side, 3)[:, 0, :, 0].reshape(16, 3).astype(int)
    framed = (corners[:, 1] - corners[:, [0, 2]].max(1) > 20).nonzero()[0]
    model.algorithms[0].write(batch, model)
    assert set(batch[VISIBLE][0, :4].tolist()) == {*framed.tolist()}
