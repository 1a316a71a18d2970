"""An algorithm that predicts places is not told them, and only one edits those of a pass."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pospre
from pospre.batch import Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from tests.algorithms.cases import GROUPS, tiny_model
from tests.refusals import refuses


class PlaceInReference(Objective):
    """LOCA's head: which patch of the reference view each patch of a query view lies on."""

    def __init__(self, encoder: PatchEncoder, options: Any) -> None:
        super().__init__()
        dim, patches = encoder.embed_dim, encoder.num_patches
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

    objective = PlaceInReference

    def uses(self, encoder: PatchEncoder) -> Uses:
        return Uses(
            views={"view": 1, "second": 1},
            passes={"student": Pass(), "query": Pass("second")},
            keys={"loca/place": None},
            predicts="view_places",
        )

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


def model_of(*methods: PretrainAlgorithm, positions: str = "sincos") -> PretrainModel:
    views = {name: GROUPS[name] for name in ("view", "second")}
    return tiny_model(*methods, views=views, positions=positions)


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


@pytest.mark.parametrize("positions", ["sincos", "none"])
def test_alone_it_trains_with_a_table_that_knows_its_own_view_only(positions: str) -> None:
    model = model_of(Loca(), positions=positions)
    batch = model.prepare(batch_of(), 0.0)
    assert torch.equal(batch["loca/place"][0], torch.arange(16))  # the same box
    model.loss(model(batch), batch)["total"].backward()


@dataclass(kw_only=True, eq=False)
class Teller(PretrainAlgorithm):
    """It writes a key that it did not declare."""

    key: ClassVar[str] = "view/field_box"

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare no key."""
        return Uses()

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Say where the view lies."""
        batch[self.key] = torch.rand(4, 1, 4)


class Overwriter(Teller):
    """It writes a key of another algorithm."""

    key: ClassVar[str] = "loca/place"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Teller, r"'view/field_box', which no algorithm declares.*keys=\{'\*/field_box': None\}"),
        (Overwriter, r"'loca/place', which Loca declares.*keys=\{'loca/place': None\}"),
    ],
)
def test_a_key_that_was_not_declared_is_not_written(kind: type[Teller], said: str) -> None:
    model = model_of(kind(), Loca())
    refuses(rf"{kind.__name__} writes the batch key {said}", lambda: model.prepare(batch_of(), 0.0))
