"""Gram anchoring: how patches resemble each other stays as in the reference.

DINOv3 (Siméoni et al. 2025, arXiv 2508.10104, Sec. 4). Long training, or training on few images,
blurs patch features. The loss compares the matrix of cosines between all patches of an image with
the reference's, and leaves the features themselves free: a common rotation costs nothing.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from pospre.batch import Batch
from pospre.model.comparison import Comparison, ComparisonAlgorithm, Pair
from pospre.model.layout import Layout
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder


class GramAnchor(Comparison):
    """The loss; there is no head."""

    def __init__(self, encoder: PatchEncoder, options: "Gram", layout: Layout) -> None:
        super().__init__(encoder, options, layout)
        self.level = options.level

    def compare(self, pair: Pair) -> Outputs:
        """Return ``gram``."""
        return {"gram": self._difference(pair)}

    def _difference(self, pair: Pair) -> Tensor:
        if self.level == "image":
            return pair.mean(gram_differences(pair.student, pair.target))
        counts = pair.weight.flatten()[:, None, None]  # a view that does not count has zeros
        student, target = (each.flatten(0, 1)[None] for each in (pair.student, pair.target))
        student, target = (F.normalize(x, dim=-1, eps=1e-12) for x in (student, target))
        count = counts.expand(*pair.student.shape[:2], 1).flatten(0, 1)
        pairs = (count * count.T).sum().clamp_min(1)
        difference = student @ student.mT - target @ target.mT
        return (difference.square() * count * count.T).sum() / pairs

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return it."""
        return outputs["gram"]


def gram_differences(student_RKD: Tensor, target_RKE: Tensor) -> Tensor:
    """Return the mean squared difference of all cosines between patches of each view, (R,)."""
    student, target = (F.normalize(x, dim=-1, eps=1e-12) for x in (student_RKD, target_RKE))
    return (student @ student.mT - target @ target.mT).square().mean((1, 2))


@dataclass(kw_only=True, eq=False)
class Gram(ComparisonAlgorithm):
    """Keeps the cosines between patches as they are in the reference.

    With a host that hides patches, it compares those that the encoder gets. The reference may have
    another width, patch size or resolution: its map is read at the centres of the patches, before
    lengths are normalised. In DINOv3's code masked crops count too, and the map is resized
    bicubically: ``on: all`` and ``resize: bicubic``.
    """

    objective: ClassVar[type[Objective] | None] = GramAnchor

    level: Literal["image", "batch"] = "image"
    """Whose patches are compared: those of one view, or of all views of the batch."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total; DINOv3 has 2."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes that are compared."""
        coupled = {"the patches": self.level == "batch"}
        return Uses(views={}, passes=self.passes(), predicts="content", couples=coupled)
