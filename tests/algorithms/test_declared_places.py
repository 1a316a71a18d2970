"""A batch key is written by the algorithm that declares it, and by no other."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import pospre
from pospre.batch import Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder
from tests.algorithms.cases import GROUPS, made, tiny_model
from tests.refusals import refuses


def model_of(*methods: PretrainAlgorithm, positions: str = "sincos") -> PretrainModel:
    views = {name: GROUPS[name] for name in ("view", "query")}
    return tiny_model(*methods, views=views, positions=positions)


def batch_of() -> Batch:
    corner = torch.rand(4, 1, 2) * 0.3
    found: Batch = {}
    for group in ("view", "query"):
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

    key: ClassVar[str] = "loca/context"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Teller, r"'view/field_box', which no algorithm declares.*keys=\{'\*/field_box': None\}"),
        (Overwriter, r"'loca/context', which loca declares.*keys=\{'loca/context': None\}"),
    ],
)
def test_a_key_that_was_not_declared_is_not_written(kind: type[Teller], said: str) -> None:
    model = model_of(kind(), made("loca"))
    refuses(rf"{kind.__name__} writes the batch key {said}", lambda: model.prepare(batch_of(), 0.0))
