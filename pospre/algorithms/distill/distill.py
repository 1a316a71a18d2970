"""Feature distillation: patches and class token become those of the reference.

As in the distillation of DINOv2 (Oquab et al. 2023, arXiv 2304.07193, Sec. 5), but of features,
because heads of published encoders are not published. The reference may have another width, patch
size or resolution. With an encoder of other positions, it teaches published features to them; then
targets may lack places (``debiased``), or be means over shifts (``rolled``).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from pospre.algorithms.distill.targets import (
    MOST_DIRECTIONS,
    equalising_turn,
    hadamard,
    place_directions,
    spread,
)
from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.comparison import (
    Comparison,
    ComparisonAlgorithm,
    Pair,
    half_squared_distance,
)
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs, Sampled
from pospre.model.progress import Progress
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions import schemes_that

Distance = Literal["cosine", "mse", "smooth_l1"]


class FeatureMatching(Comparison):
    """The projections to the reference's width, and the distances."""

    def __init__(self, encoder: PatchEncoder, options: "Distill", layout: Layout) -> None:
        super().__init__(encoder, options, layout)
        assert layout.reference is not None
        self.options, width = options, layout.reference.embed_dim
        if options.is_fitted:  # the spread is 0 until then
            self.spread = nn.Buffer(torch.zeros(()))
        if options.standardise == "phi_s":
            self.turn = nn.Buffer(torch.eye(width))
        if options.target == "debiased":
            self.mean = nn.Buffer(torch.zeros(width))
            self.directions = nn.Buffer(torch.zeros(width, MOST_DIRECTIONS))
        self.project: nn.Module = projection(encoder, layout.reference, options.projection)
        self.project_class: nn.Module = nn.Identity()
        if options.class_weight:
            self.project_class = projection(encoder, layout.reference, options.projection)

    @torch.no_grad()
    def calibrate(self, sampled: Sampled) -> None:
        """Fit to the reference's patches how features are standardised, and where places are."""
        self.spread.copy_(spread(sampled.patches))
        if self.options.standardise == "phi_s":
            self.turn.copy_(equalising_turn(sampled.patches))
        if self.options.target == "debiased":
            self.mean.copy_(sampled.patches.mean(0))
            found = place_directions(sampled)
            self.directions[:, : found.shape[1]] = found

    def compare(self, pair: Pair) -> Outputs:
        """Return the distances ``patches`` and, if it counts, ``class``."""
        target = pair.target
        if self.options.target == "debiased":
            target = target - (target - self.mean) @ self.directions @ self.directions.T
        terms = {"patches": pair.mean(self._distances(self.project(pair.student), target).mean(1))}
        if self.options.class_weight and pair.target_prefix is not None:
            student = self.project_class(pair.student_prefix[:, 0])
            terms["class"] = pair.mean(self._distances(student, pair.target_prefix[:, 0]))
        return terms

    def _distances(self, student: Tensor, target: Tensor) -> Tensor:
        """Return the distances of standardised vectors; their mean plays no role."""
        if self.options.standardise is not None:
            student, target = (each / self.spread for each in (student, target))
        if self.options.standardise == "phi_s":
            student, target = (each @ self.turn for each in (student, target))
        return distances(student, target, self.options.distance)

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

    target: Literal["raw", "debiased", "rolled"] = "raw"
    """The reference's features: as they are; patches without the directions in which places differ;
    or means over shifted views, for encoders with ``torus`` or ``none``.
    """
    num_rolls: PositiveInt = 4
    """Shifts of each view with ``target: rolled``; the reference runs so many times."""
    standardise: Literal["isotropic", "phi_s"] | None = None
    """Divide features by their spread, with ``mse`` and ``smooth_l1``; ``phi_s`` turns them first,
    for ``smooth_l1``, so that all channels vary alike.
    """

    @property
    def is_fitted(self) -> bool:
        """Whether it is fitted to the reference's features before the first step."""
        return self.standardise is not None or self.target == "debiased"

    def reference_pass(self, name: str) -> str:
        """Return the reference's pass beside the pass ``name``."""
        return f"reference/{name}/rolled" if self.target == "rolled" else f"reference/{name}"

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for options without effect, or positions that shifts change."""
        super().check_encoder(encoder)
        self.check_used("local", self.patch_weight > 0, "patch_weight")
        self.check_used("num_rolls", self.target == "rolled", "target")
        self.check_used("standardise", self.distance != "cosine", "distance")
        if self.standardise == "phi_s" and self.distance == "mse":
            raise UserError(
                "distill.standardise = phi_s turns features, which no mse can tell. Use "
                "distill.standardise: isotropic, or distill.distance: smooth_l1."
            )
        if self.target == "debiased" and not self.patch_weight:
            raise UserError(
                "distill.target = debiased is of patches, but distill.patch_weight = 0. Use "
                "distill.target: raw."
            )
        if self.target == "rolled" and not encoder.positions.is_cyclic:
            raise UserError(
                "distill.target = rolled needs features that move with a shifted image, but "
                f"encoder.positions = {encoder.positions.name}. Use {schemes_that('is_cyclic')}."
            )

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Raise ``UserError`` if training begins and nothing has been fitted."""
        if self.is_fitted and model.training and not progress.step:
            objective: Any = model.objectives[self.module_name()]
            if not objective.spread:
                raise UserError(
                    "distill.target = debiased and distill.standardise are fitted to the "
                    "reference's features first: pospre.calibrate(model, batches)."
                )

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes that are compared."""
        if not (self.patch_weight or self.class_weight):
            raise UserError(
                "distill.patch_weight = 0 and distill.class_weight = 0 leave no loss. 1 and 0.2 "
                "are usual."
            )
        passes = self.passes(
            rolls=self.num_rolls if self.target == "rolled" else 0,
            class_token="distill.class_weight" if self.class_weight else None,
        )
        fitted = tuple(key for key, own in passes.items() if own.reference and self.is_fitted)
        return Uses(views={}, passes=passes, predicts="content", calibrates=fitted)

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
        if self.standardise == "phi_s":
            hadamard(reference.embed_dim)  # raises, if there is none
        if self.projection is False and own != reference.embed_dim:
            raise UserError(
                f"distill.projection = False, but the encoder has width {own} and the reference "
                f"{reference.embed_dim}. Remove it."
            )
