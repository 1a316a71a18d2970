"""A momentum average of the weights, next to any host: for evaluation, export, or as a teacher.

(Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv 1703.01780.)
"""

from dataclasses import dataclass
from typing import Literal

from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.teacher import Momentum
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder


@dataclass(kw_only=True, eq=False)
class EmaTeacher(PretrainAlgorithm):
    """Keeps a teacher that follows the encoder, and the class head if there is one.

    lut, and methods whose momentum is null, use this teacher. Evaluation and export use
    its weights with ``--weights teacher``, and another run with ``encoder.weights_from: teacher``.
    """

    momentum_start: float = 0.9999
    """Momentum at the first step, in [0, 1) (DeiT: 0.99996)."""
    momentum_end: float = 1.0
    """Limit of the momentum at the last step; unused by ``constant``."""
    shape: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule between them."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the teacher."""
        momentum = Momentum(self.momentum_start, self.momentum_end, self.shape)
        return Uses(views={}, teacher=momentum, averages=True)
