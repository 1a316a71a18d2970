"""PaKA: the patches of an image relate to each other as in the reference, by kernel alignment.

arXiv 2509.05606 (2025). The loss is one minus the centred kernel alignment (CKA,
linear) of the two encoders' patches of an image. Unlike ``gram`` it does not see a shift that all
patches share, nor a common scale; but it sees the patches' lengths.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from pospre.batch import Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.comparison import (
    COMPARED,
    Comparison,
    Resize,
    Views,
    check_compared,
    without_autocast,
)
from pospre.model.layout import Layout
from pospre.model.objective import Objective, Outputs
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder

_SMALLEST = 1e-6


class KernelAlignment(Comparison):
    """The loss; there is no head."""

    def __init__(self, encoder: PatchEncoder, options: "PaKA", layout: Layout) -> None:
        super().__init__(encoder, layout, on=options.on, resize=options.resize)
        self.weight = options.weight

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``distance``, the mean over the passes."""
        with without_autocast(batch["index"]):
            distances = [
                pair.mean(1 - alignments(pair.student, pair.target))
                for pair in self.pairs(passes, batch)
            ]
        return {"distance": torch.stack(distances).mean()}

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
class PaKA(PretrainAlgorithm):
    """Keeps how the patches of each view relate to each other, by centred kernel alignment.

    With a host that hides patches, it compares those that the encoder gets. The reference may have
    another width, patch size or resolution.
    """

    objective: ClassVar[type[Objective] | None] = KernelAlignment

    on: Views = "unmasked"
    """Views that count: those in which no patch is replaced by a mask token, or all."""
    resize: Resize = "auto"
    """How the reference's map gets to another grid: ``auto``, bilinear or the mean; ``bicubic``."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the passes that are compared."""
        return Uses(views={}, passes=COMPARED, predicts="content")

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no view would count."""
        check_compared(layout, self.module_name(), self.on)

    def head(self, encoder: PatchEncoder, layout: Layout) -> Any:
        """Return the loss."""
        return KernelAlignment(encoder, self, layout)
