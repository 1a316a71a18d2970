"""Feature distillation: patches and class token become those of the reference.

As in the distillation of DINOv2 (Oquab et al. 2023, arXiv 2304.07193, Sec. 5), but of features,
because heads of published encoders are not published. The reference may have another width, patch
size or resolution. With an encoder of other positions, it teaches published features to them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.comparison import (
    COMPARED,
    Comparison,
    ComparisonAlgorithm,
    Pair,
    half_squared_distance,
)
from pospre.model.layout import Layout
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder

Distance = Literal["cosine", "mse", "smooth_l1"]


class FeatureMatching(Comparison):
    """The projections to the reference's width, and the distances."""

    def __init__(self, encoder: PatchEncoder, options: "Distill", layout: Layout) -> None:
        super().__init__(encoder, options, layout)
        assert layout.reference is not None
        self.options = options
        self.project: nn.Module = projection(encoder, layout.reference, options.projection)
        self.project_class: nn.Module = nn.Identity()
        if options.class_weight:
            self.project_class = projection(encoder, layout.reference, options.projection)

    def compare(self, pair: Pair) -> Outputs:
        """Return the distances ``patches`` and, if it counts, ``class``."""
        kind = self.options.distance
        patches = distances(self.project(pair.student), pair.target, kind).mean(1)
        terms = {"patches": pair.mean(patches)}
        if self.options.class_weight:
            student = self.project_class(pair.student_prefix[:, 0])
            terms["class"] = pair.mean(distances(student, pair.target_prefix[:, 0], kind))
        return terms

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return their weighted sum."""
        total = self.options.patch_weight * outputs["patches"]
        if "class" in outputs:
            total = total + self.options.class_weight * outputs["class"]
        return total

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return both distances before their weights."""
        return dict(outputs)


def projection(encoder: PatchEncoder, reference: PatchEncoder, asked: bool | None) -> nn.Module:
    """Return a linear map to the reference's width; none is needed where widths agree."""
    if asked is False or (asked is None and encoder.embed_dim == reference.embed_dim):
        return nn.Identity()
    linear = nn.Linear(encoder.embed_dim, reference.embed_dim)
    nn.init.trunc_normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


def distances(student: Tensor, target: Tensor, kind: Distance) -> Tensor:
    """Return the distance of each vector (…, D) to its target."""
    if kind == "cosine":
        return half_squared_distance(student, target)
    compared = F.mse_loss if kind == "mse" else F.smooth_l1_loss
    return compared(student, target, reduction="none").mean(-1)


@dataclass(kw_only=True, eq=False)
class Distill(ComparisonAlgorithm):
    """Makes patches and class token those of the reference, alone or beside a host.

    With a host that hides patches, those that the encoder gets are compared. A reference of another
    width is compared after a linear map of the trained encoder's tokens, which exports leave out.
    """

    objective: ClassVar[type[Objective] | None] = FeatureMatching

    distance: Distance = "cosine"
    """``cosine``: one minus it; ``mse`` or ``smooth_l1``: of the channels."""
    patch_weight: NonNegativeFloat = 1.0
    """Weight of the patches."""
    class_weight: NonNegativeFloat = 0.2
    """Weight of the class token; with 0 it drifts unseen."""
    projection: bool | None = None
    """Whether a linear map leads to the reference's width; None: only if it is another."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes that are compared."""
        if not (self.patch_weight or self.class_weight):
            raise UserError(
                "distill.patch_weight = 0 and distill.class_weight = 0 leave no loss. 1 and 0.2 "
                "are usual."
            )
        token = "distill.class_weight" if self.class_weight else None
        passes = {
            name: one if one.reference else replace(one, class_token=token)
            for name, one in COMPARED.items()
        }
        return Uses(views={}, passes=passes, predicts="content")

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no view would count, or the reference does not fit."""
        super().check(layout)
        reference, own = layout.reference, layout.encoder.embed_dim
        assert reference is not None
        if self.class_weight and not reference.has_class_token:
            raise UserError(
                f"distill.class_weight = {self.class_weight} needs a class token, but the "
                "reference has none. Use distill.class_weight: 0."
            )
        if self.projection is False and own != reference.embed_dim:
            raise UserError(
                f"distill.projection = False, but the encoder has width {own} and the reference "
                f"{reference.embed_dim}. Remove it."
            )
