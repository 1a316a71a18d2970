"""PaKA: the patches of an image relate to each other as in the reference, by kernel alignment.

arXiv 2509.05606 (2025). The loss is one minus the centred kernel alignment (CKA,
linear) of the two encoders' patches of an image. Unlike ``gram`` it does not see a shift that all
patches share, nor a common scale; but it sees the patches' lengths.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pospre.batch import Batch
from pospre.model.comparison import Comparison, ComparisonAlgorithm, Pair
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder

_SMALLEST = 1e-6


class KernelAlignment(Comparison):
    """The loss; there is no head."""

    def compare(self, pair: Pair) -> Outputs:
        """Return ``distance``."""
        return {"distance": pair.mean(1 - alignments(pair.student, pair.target))}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return it."""
        return outputs["distance"]


def alignments(student_RKD: Tensor, target_RKE: Tensor) -> Tensor:
    """Return CKA of the patches of each view, (R,): 1 if equal, 0 if those of one are constant."""
    student, target = (each - each.mean(1, keepdim=True) for each in (student_RKD, target_RKE))
    pairs = ((student, target), (student, student), (target, target))
    cross, own, theirs = (_squared(first, second) for first, second in pairs)
    return cross / (own.clamp_min(_SMALLEST) * theirs.clamp_min(_SMALLEST)).sqrt()


def _squared(first_RKD: Tensor, second_RKE: Tensor) -> Tensor:
    """Return ‖XᵀY‖² of each view: the product of the two kernels, without K² numbers."""
    return (first_RKD.mT @ second_RKE).square().sum((1, 2))


@dataclass(kw_only=True, eq=False)
class PaKA(ComparisonAlgorithm):
    """Keeps how the patches of each view relate to each other, by centred kernel alignment.

    With a host that hides patches, it compares those that the encoder gets. The reference may have
    another width, patch size or resolution.
    """

    objective: ClassVar[type[Objective] | None] = KernelAlignment

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes that are compared."""
        return Uses(views={}, passes=self.passes(), predicts="content")
