"""LeJEPA: alike views, Gaussian features (Balestriero and LeCun 2025, arXiv 2511.08544).

Projections of all views of an image are pulled to the mean of its global views. Nothing keeps them
from being all equal but SIGReg, which tests whether they are Gaussian along random directions:
there is no teacher, no stopped gradient and no schedule.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from pospre.algorithms.lejepa.sigreg import SIGReg
from pospre.algorithms.lut.projector import Projector
from pospre.batch import INDEX, Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.progress import Progress
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import pooled
from pospre.ranges import PositiveShare

GROUPS = ("global", "local")


class ViewAgreement(Objective):
    """The projector, the invariance of its outputs, and SIGReg of each view's."""

    def __init__(self, encoder: PatchEncoder, options: "LeJEPA") -> None:
        super().__init__()
        self.weight, self.share = options.weight, options.sigreg_weight
        self.prefix, self.has_class_token = encoder.num_prefix_tokens, encoder.has_class_token
        widths = encoder.embed_dim, options.hidden_dim, options.hidden_dim, options.projection_dim
        self.project = Projector(*widths, bias=True)
        self.sigreg = SIGReg(options.projection_dim, options.num_slices)

    def after_step(self) -> None:
        """Move the running statistics."""
        for norm in self.project.norms:
            norm.after_step()

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return the losses ``inv`` and ``sigreg``, and the ``std`` of a channel: scalars."""
        rows = len(batch[INDEX])
        views = [
            pooled(passes[group], self.prefix, self.has_class_token).unflatten(0, (rows, -1))
            for group in GROUPS
            if group in passes
        ]
        tokens_VBD = torch.cat(views, dim=1).transpose(0, 1)
        for norm in self.project.norms if self.training else ():
            norm.begin()
        projected = self.project(tokens_VBD).float()
        for norm in self.project.norms if self.training else ():
            norm.end(rows)
        return {
            "inv": invariance(projected, views[0].shape[1]),
            "sigreg": self.sigreg(projected),
            "std": projected.detach().flatten(0, 1).std(0).mean(),
        }

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return (1 − λ)·inv + λ·sigreg."""
        return (1 - self.share) * outputs["inv"] + self.share * outputs["sigreg"]

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return both losses (SIGReg of Gaussian features is 1.05) and ``std`` (collapse: 0)."""
        return {key: value.detach() for key, value in outputs.items()}


def invariance(projected_VBD: Tensor, num_global: int) -> Tensor:
    """Return the mean square of what projections differ from the mean of the global views'.

    The gradient also flows through this mean. The global views come first.
    """
    centre = projected_VBD[:num_global].mean(0)
    return (projected_VBD - centre).square().mean()


@dataclass(kw_only=True, eq=False)
class LeJEPA(PretrainAlgorithm):
    """The host that makes views of an image alike and features Gaussian.

    Needs the view group ``global``, usually of two views; ``local`` may have any number or be
    missing. Writes no batch keys. SIGReg and batch norm see the samples of one forward pass, of
    all ranks.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Crops of one picture should look alike, and all pictures like Gaussian noise. Do they?",
        "inv",
        "mean squared distance of a crop from the mean of the large crops",
    )
    objective = ViewAgreement
    is_host: ClassVar[bool] = True

    sigreg_weight: PositiveShare = 0.05
    """λ in (1 − λ)·invariance + λ·SIGReg (lightly: 0.05; paper: 0.01 to 0.1)."""
    num_slices: PositiveInt = 1024
    """S, random directions of SIGReg, drawn for each step."""
    hidden_dim: PositiveInt = 2048
    """Width of the projector's two hidden layers."""
    projection_dim: PositiveInt = 64
    """Width of its output."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes over whole crops."""
        reads_patches = not encoder.has_class_token
        return Uses(
            views={"global": None},
            passes={
                "global": Pass("global", needs_patches=reads_patches),
                "local": Pass("local", needs_patches=reads_patches, optional=True),
            },
            predicts="content",
            couples={"SIGReg and the batch norm": True},
        )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` for a single view, or if patches of its views are masked."""
        if sum(layout.views[group].count for group in GROUPS if group in layout.views) == 1:
            raise UserError(
                "algorithms.lejepa pulls the views of an image to their mean, but "
                "data.views.global.count is 1 and there is no other view. Set it to 2, or add "
                "data.views.local."
            )
        for group in GROUPS:
            if layout.masked(group):
                raise UserError(
                    f"algorithms.lejepa compares whole views, but in some of data.views.{group} "
                    "patches are replaced by a mask token. Leave one of the methods out; "
                    "dinov2.spread = sigreg gives dinov2 the same regulariser."
                )

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Draw SIGReg's slices."""
        model.objectives.of(ViewAgreement).sigreg.draw(model.seed, progress)
