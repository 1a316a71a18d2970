"""Evaluations take methods that they have never heard of, by what these declare."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from pospre.model.uses import Hides, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import PatchMasking, slot_mask
from pospre.ranges import Ratio
from pospre.recipe.recipe import Recipe, recipe_from_dict
from pospre.reporting.live_page import draw_views
from pospre.training.build import build_model
from tests.evaluation.checkpoints import results_of, tiny_recipe
from tests.refusals import refuses


class Reader(PositionObjective):
    """A linear layer that reads off where each visible patch is."""

    def __init__(self, encoder: PatchEncoder, options: Any) -> None:
        super().__init__(encoder)
        self.read = nn.Linear(encoder.embed_dim, encoder.num_patches)

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

    def uses(self, encoder: PatchEncoder) -> Uses:
        return Uses(
            hides=Hides.by(PatchMasking.by_ratio("lost", encoder.grid, self.mask_ratio)),
            passes={"student": Pass(over="seen", edits_places=True)},
            keys={"lost/known": "known"},
            predicts="places",
        )

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        return ForgottenPlaces("lost/known", None)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        rows, visible = batch[VISIBLE].shape
        half = torch.arange(visible // 2, device=batch["index"].device)
        batch["lost/known"] = slot_mask(half.expand(rows, -1), visible)


class Placing(PositionObjective):
    """A linear layer that reads off the places of the query's patches, as LOCA does."""

    def __init__(self, encoder: PatchEncoder, options: "Places") -> None:
        super().__init__(encoder)
        self.read = nn.Linear(encoder.embed_dim, encoder.num_patches)
        self.reads = options.reads

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        tokens = passes["query"]
        if self.reads == "both":
            tokens = tokens + passes["student"].mean(1, keepdim=True)
        return {"logits": self.read(tokens[:, self.num_prefix :])}

    def answers(self, outputs: Outputs, batch: Batch) -> Answers:
        logits = outputs["logits"]
        places = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
        nowhere = torch.zeros_like(places, dtype=torch.bool)
        return Answers(logits, places, nowhere, ~nowhere)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"].mT, self.answers(outputs, batch)[1])


@dataclass(kw_only=True, eq=False)
class Places(PretrainAlgorithm):
    """Where are the patches of the view ``query``?"""

    objective = Placing
    reads: str = "both"

    def uses(self, encoder: PatchEncoder) -> Uses:
        passes = {"query": Pass("query")}
        if self.reads == "both":
            passes["student"] = Pass()
        return Uses(views={"query": None}, passes=passes, predicts="places")

    def write(self, batch: Batch, model: PretrainModel) -> None:
        assert not batch["query/flip"].any()
        self.seen = batch["query/box"]


class Painter(PixelObjective):
    """A linear layer that paints each hidden patch from the mean of those that are seen."""

    def __init__(self, encoder: PatchEncoder, options: Any) -> None:
        super().__init__(encoder)
        self.paint = nn.Linear(encoder.embed_dim, 16 * 16 * 3)

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

    def uses(self, encoder: PatchEncoder) -> Uses:
        hides = Hides.by(PatchMasking(encoder.grid, 4))
        return Uses(hides=hides, passes={"student": Pass(over="seen")})


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


@pytest.mark.parametrize(("reads", "size", "count"), [("both", 32, 1), ("query", 64, 2)])
def test_a_method_over_a_second_view_group_is_measured(
    tmp_path: Path, image_folder: Callable[..., Path], reads: str, size: int, count: int
) -> None:
    others = {} if reads == "both" else {"supervised": {"num_classes": 2, "pooling": "mean"}}
    recipe = tiny_recipe(
        tmp_path, {f"{__name__}:Places": {"reads": reads}, **others}, positions="none", depth=1
    )
    views = {
        "view": {},
        "query": {"count": count, "size": size, "scale": [0.1, 0.3], "inside": "view"},
    }
    recipe = recipe_from_dict(recipe.dump() | {"data": recipe.dump()["data"] | {"views": views}})
    model, data = build_model(recipe), image_folder(num_images=3)
    measure = partial(results_of, recipe=recipe, data=data, model=model, baseline=False)
    (cell,) = measure("position_grid")["cells"]
    patches = (size // 16) ** 2
    assert (cell["visible"], cell["dropped"], cell["tokens"]) == (
        patches,
        patches,
        3 * count * patches,
    )
    assert (cell["mask_ratio"], cell["position_mask_ratio"], cell["chance"]) == (0, 1, 1 / 16)
    (row,) = measure("patch_position")["ratios"]
    assert (row["top1"], row["mask_ratio"]) == (cell["accuracy"], 0)
    pictures = partial(
        results_of, "position_pictures", recipe, data, tmp_path / "p.json", model, num_pictures=2
    )
    if reads == "both":
        refuses(r"Places reads the view groups query, view", pictures)
    else:
        assert len(pictures()["pictures"]) == 2


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
    draw_views(model, batch, tmp_path / "views", step=1)
    (group,) = json.loads((tmp_path / "views" / "views.json").read_text())["groups"]
    assert group["legend"].endswith("; framed in green: known")
    strip = np.asarray(Image.open(tmp_path / "views" / group["files"][0]))
    side = strip.shape[0] // 4
    corners = strip.reshape(4, side, 4, side, 3)[:, 0, :, 0].reshape(16, 3).astype(int)
    framed = (corners[:, 1] - corners[:, [0, 2]].max(1) > 20).nonzero()[0]
    model.draw(batch)
    assert set(batch[VISIBLE][0, :4].tolist()) == {*framed.tolist()}
