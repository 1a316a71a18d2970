"""An algorithm that predicts places is not told them, and only one edits those of a pass."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pospre
from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.needs import Needs
from pospre.model.objective import Objective, Outputs, Predicts
from pospre.model.passes import EncoderPass
from pospre.nn.places import Places
from pospre.nn.vit import Encoder
from tests.algorithms.cases import GROUPS, bare_model


class PlaceInReference(Objective):
    """LOCA's head: which patch of the reference view each patch of a query view lies on."""

    predicts: ClassVar[Predicts | None] = "view_places"

    def __init__(self, dim: int, patches: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.predict = nn.Linear(dim, patches)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        query, reference = passes["query"][:, 1:], passes["student"][:, 1:]
        return {"logits": self.predict(query + self.attend(query, reference, reference)[0])}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs["logits"].flatten(0, 1), batch["loca/place"].flatten())


@dataclass(kw_only=True, eq=False)
class Loca(PretrainAlgorithm):
    """Where in the view ``view`` is each patch of the view ``second``?"""

    head: ClassVar[type[PlaceInReference]] = PlaceInReference

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(views={"view": 1, "second": 1})

    def attach(self, model: PretrainModel) -> None:
        model.registry.claim("loca/place", "Loca")
        model.registry.add_pass("student", "Loca", EncoderPass())
        model.registry.add_pass("query", "Loca", EncoderPass(group="second"))
        model.add_objective("Loca", self.head(model.encoder.embed_dim, model.encoder.num_patches))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        reference, query = batch["view/box"][:, 0], batch["second/box"][:, 0]
        rows, cols = model.encoder.grid
        size = reference[:, 2:] - reference[:, :2]
        share = torch.stack(torch.meshgrid(*self._centres(cols, rows), indexing="xy"), -1) + 0.5
        share = share.flatten(0, 1) / torch.tensor([cols, rows])
        at = query[:, None, :2] + (query[:, 2:] - query[:, :2])[:, None] * share
        cell = (at - reference[:, None, :2]) / size[:, None] * torch.tensor([cols, rows])
        col, row = (
            part.long().clamp(0, end - 1)
            for part, end in zip(cell.unbind(-1), (cols, rows), strict=True)
        )
        batch["loca/place"] = row * cols + col

    def _centres(self, *counts: int) -> list[Tensor]:
        return [torch.arange(count).float() for count in counts]


class Silent(PlaceInReference):
    """It does not say what it predicts."""

    predicts: ClassVar[Predicts | None] = None


class SilentLoca(Loca):
    """With an editor, and without a word of what is asked."""

    head: ClassVar[type[PlaceInReference]] = Silent

    def attach(self, model: PretrainModel) -> None:
        """Add an editor of places to the query's pass."""
        super().attach(model)
        model.places.named["Loca"] = Forgetting()
        model.registry.join_pass("query", "Loca", places=("Loca",))


class Forgetting(nn.Module):
    """Takes every place away."""

    def forward(self, places: Places, batch: Batch, where: EncoderPass) -> Places:
        return places.forget(torch.ones(1, 1, dtype=torch.bool))


def model_of(positions: str = "sincos") -> PretrainModel:
    views = {name: GROUPS[name] for name in ("view", "second")}
    return bare_model(views=views, positions=positions)


def batch_of() -> Batch:
    corner = torch.rand(4, 1, 2) * 0.3
    found: Batch = {}
    for group in ("view", "second"):
        images = torch.randint(0, 256, (4, 1, 3, 32, 32), dtype=torch.uint8)
        box = torch.cat([corner, corner + 0.5], -1)
        found |= pospre.from_images(
            images,
            group=group,
            boxes=box,
            mirrored=torch.zeros(4, 1, dtype=torch.bool),
            index=torch.arange(4),
            epoch=0,
        )
    return found


def test_a_task_of_places_in_another_view_is_refused_beside_a_field() -> None:
    message = r"algorithms.Loca predicts places, but crop_field gives .* hide those"
    model = model_of()
    pospre.attach(model, Loca)
    with pytest.raises(UserError, match=message):
        pospre.attach(model, "crop_field")
    model = model_of()
    model.registry.add_pass("student", "test", EncoderPass())
    pospre.attach(model, "crop_field")
    with pytest.raises(UserError, match=message):
        pospre.attach(model, Loca)


@pytest.mark.parametrize("positions", ["sincos", "none"])
def test_alone_it_trains_with_a_table_that_knows_its_own_view_only(positions: str) -> None:
    model = model_of(positions)
    pospre.attach(model, Loca)
    batch = model.prepare(batch_of(), 0.0)
    assert torch.equal(batch["loca/place"][0], torch.arange(16))  # the same box
    model.loss(model(batch), batch)["total"].backward()


def test_an_editor_of_places_must_say_what_it_predicts() -> None:
    with pytest.raises(UserError, match=r"Loca changes the places .* must say what"):
        pospre.attach(model_of(), SilentLoca)


@dataclass(kw_only=True, eq=False)
class Teller(PretrainAlgorithm):
    """It writes a key that it did not claim."""

    key: ClassVar[str] = "view/field_box"

    def attach(self, model: PretrainModel) -> None:
        """Read the pass of another algorithm."""
        model.registry.join_pass("student", self.module_name())

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Say where the view lies."""
        batch[self.key] = torch.rand(4, 1, 4)


class Overwriter(Teller):
    """It writes a key of another algorithm."""

    key: ClassVar[str] = "loca/place"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Teller, r"'view/field_box', which no algorithm claims.*registry\.place_views\(owner\)"),
        (Overwriter, r"'loca/place', which Loca claims.*claim\('loca/place', owner\)"),
    ],
)
def test_a_key_that_was_not_claimed_is_not_written(kind: type[Teller], said: str) -> None:
    model = model_of()
    pospre.attach(model, Loca)
    pospre.attach(model, kind)
    with pytest.raises(UserError, match=rf"{kind.__name__} writes the batch key {said}"):
        model.prepare(batch_of(), 0.0)


def test_who_claims_the_boxes_of_views_places_them() -> None:
    model = model_of()
    pospre.attach(model, Loca)
    model.registry.claim("view/field_box", "Teller")
    with pytest.raises(UserError, match=r"Loca predicts places, but Teller gives"):
        model.check_complete()


def test_a_misspelt_prediction_is_refused() -> None:
    class Misspelt(PlaceInReference):
        predicts = "view_place"  # type: ignore[assignment]

    class MisspeltLoca(Loca):
        head = Misspelt

    with pytest.raises(UserError, match=r"predicts = 'view_place'.*mean 'view_places'"):
        pospre.attach(model_of(), MisspeltLoca)
