"""SP: where one view lies from another, and how much larger it is (arXiv 2605.09963).

Two local views are encoded apart. A small head reads both features and regresses the place and size
of one relative to the other. It is a plug-in: it has views of its own, and shares the encoder alone
with a host. The details are ours: only the paper's abstract was to be had.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, Strict
from torch import Tensor, nn

from pospre import draws
from pospre.batch import Batch, box_key, flip_key, known_boxes
from pospre.data.views.boxes import NUM_BOX_DRAWS, random_boxes
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.position_task import PlaceObjective, Relations
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_weights
from pospre.nn.masking import pooled
from pospre.ranges import only

GROUP = "pair"
_PAIRS, _SIDE = 20_000, 1000

Deviations = Annotated[
    tuple[float, float, float, float],
    Strict(False),
    only(lambda four: min(four) > 0, "four numbers above 0: of x, y, width and height"),
]


def relations(first_B4: Tensor, second_B4: Tensor) -> Tensor:
    """Return place and size of the second box relative to the first: (B, 4).

    (x₂ − x₁) / √(w₁ w₂), the same of y and heights, ln(w₂ / w₁), ln(h₂ / h₁), of centres x, y.
    Exchanged boxes give the negative. The image's shape cancels, so boxes may be shares of it.
    """
    (low1, high1), (low2, high2) = (box.split(2, dim=-1) for box in (first_B4, second_B4))
    size1, size2 = high1 - low1, high2 - low2
    offset = (low2 + high2 - low1 - high1) / (2 * (size1 * size2).sqrt())
    return torch.cat([offset, (size2 / size1).log()], dim=-1)


@functools.cache
def deviations(scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[float, ...]:
    """Return the standard deviations of ``relations`` between random crops of square images."""
    keys = draws.sample_keys(0, 0, np.arange(2 * _PAIRS), 0, "sp/deviations")
    draw = draws.uniform(keys, NUM_BOX_DRAWS).astype(np.float64)
    corner, size = np.split(random_boxes(draw, (_SIDE, _SIDE), scale, ratio), 2, axis=1)
    boxes = torch.from_numpy(np.concatenate([corner, corner + size], axis=1)).double()
    return tuple(round(float(each), 3) for each in relations(*boxes.chunk(2)).std(0))


class RelativeViews(PlaceObjective):
    """The head over the features of both views, and the distance to their true relation.

    Args:
        encoder: the encoder.
        options: the method's.
        sigma: what the four numbers are divided by.
    """

    def __init__(self, encoder: PatchEncoder, options: "SP", sigma: tuple[float, ...]) -> None:
        super().__init__()
        self.weight, dim = options.weight, encoder.embed_dim
        self.num_prefix, self.class_token = encoder.num_prefix_tokens, options.pool == "class_token"
        self.sigma = nn.Buffer(torch.tensor(sigma), persistent=False)
        self.predict = nn.Sequential(
            *(nn.Linear(2 * dim, dim), nn.LayerNorm(dim), nn.GELU()),
            *(nn.Linear(dim, dim), nn.LayerNorm(dim), nn.GELU()),
            nn.Linear(dim, 4),
        )
        init_weights(self)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``predicted`` (B, 2, 4): the second view from the first, and the reverse."""
        features = pooled(passes[GROUP], self.num_prefix, self.class_token).unflatten(0, (-1, 2))
        both = torch.stack([features.flatten(1), features.flip(1).flatten(1)], dim=1)
        return {"predicted": self.predict(both).float()}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean smooth-L1 distance (β = 1) in deviations; .42 for zeros."""
        answers = self.answers(outputs, batch)
        return F.smooth_l1_loss(answers.predicted, answers.true)

    def answers(self, outputs: Outputs, batch: Batch) -> Relations:
        """Return predicted and true relations, in deviations. Mirrored images have x negated."""
        true = relations(*batch[box_key(GROUP)].unbind(1)) / self.sigma
        mirrored = batch[flip_key(GROUP)][:, :1]
        true = torch.cat([torch.where(mirrored, -true[:, :1], true[:, :1]), true[:, 1:]], dim=1)
        return Relations(outputs["predicted"], torch.stack([true, -true], dim=1))

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the mean R², those of place and size, and of views that overlap or do not."""
        answers = self.answers(outputs, batch)
        (low1, high1), (low2, high2) = (b.split(2, -1) for b in batch[box_key(GROUP)].unbind(1))
        overlap = (torch.maximum(low1, low2) < torch.minimum(high1, high2)).all(-1, keepdim=True)
        among = overlap.expand(-1, 2)
        # a microbatch may have one pair, whose R² can be thousands below 0
        found, near, apart = (answers.score(each).clamp_min(-1) for each in (None, among, ~among))
        return {
            "r2": found.mean(),
            "r2_place": found[:2].mean(),
            "r2_size": found[2:].mean(),
            "r2_overlapping": near.mean(),
            "r2_apart": apart.mean(),
        }


@dataclass(kw_only=True, eq=False)
class SP(PretrainAlgorithm):
    """Predict the place and size of one view relative to another, alone or beside any host.

    Needs the view group ``pair``, two random crops. Writes ``pair/flip``: both views of an image
    are mirrored like its first one. Their colours are drawn apart; leave blur out, which tells the
    size.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Two pieces of a picture. Where does one lie from the other, and how much larger is it?",
        "r2",
        "explained share of the variance of place and size",
    )
    objective: ClassVar[type[Objective] | None] = RelativeViews

    pool: Literal["patches", "class_token"] = "patches"
    """The feature of a view: the mean of its patches, or the class token, if a host trains it."""
    sigma: Deviations | None = None
    """What errors of x, y, width and height are divided by; None: the standard deviations between
    the recipe's crops of square images (for photographs of 4:3: .80, .50, .37, .37).
    """
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total; 0.5 beside a host."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over both views, and their common flip."""
        reads = "sp.pool = class_token" if self.pool == "class_token" else None
        return Uses(
            views={GROUP: 2},
            passes={GROUP: Pass(GROUP, class_token=reads, needs_patches=reads is None)},
            keys={flip_key(GROUP): None},
            predicts="view_places",
        )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` for views that are not cropped at random places and sizes."""
        views = layout.views[GROUP]
        if views.crop != "random" or views.scale[0] == views.scale[1]:
            found = f"crop = {views.crop}"
            found += f" and scale = {list(views.scale)}" if views.crop == "random" else ""
            raise UserError(
                f"algorithms.sp predicts the place and size of crops, but data.views.{GROUP} has "
                f"{found}. Use crop: random with a range of sizes, such as scale: [0.05, 0.32]."
            )
        if not min(self._spread(views)):
            raise UserError(
                f"data.views.{GROUP} has scale = {list(views.scale)} and ratio = "
                f"{list(views.ratio)}, so places or sizes of its crops of square images hardly "
                "differ, and there is nothing to predict. Use a range such as scale: [0.05, 0.32]."
            )

    def head(self, encoder: PatchEncoder, layout: Layout) -> RelativeViews:
        """Return a head whose numbers have the spread of the crops."""
        return RelativeViews(encoder, self, self._spread(layout.views[GROUP]))

    def _spread(self, views: ViewGroup) -> tuple[float, ...]:
        return self.sigma or deviations(views.scale, views.ratio)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Mirror both views like the first one."""
        known_boxes(batch, GROUP, self.module_name())
        batch[flip_key(GROUP)] = batch[flip_key(GROUP)][:, :1].repeat(1, 2)
