"""A momentum average of the weights, next to any host: for evaluation, export, or as a teacher.

(Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv 1703.01780.)
"""

from dataclasses import dataclass
from typing import Literal

from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.needs import Needs
from pospre.model.teacher import Momentum
from pospre.nn.vit import Encoder


@dataclass(kw_only=True, eq=False)
class EmaTeacher(PretrainAlgorithm):
    """Keeps a teacher that follows the encoder, and the class head if there is one.

    Algorithms listed after it whose momentum is null take this teacher. Evaluation and export use
    its weights with ``--weights teacher``, and another run with ``encoder.weights_from: teacher``.

    Args:
        momentum_start: momentum at the first step, in [0, 1).
        momentum_end: limit of the momentum at the last step; unused by ``constant``.
        shape: ``constant``, ``cosine`` or ``linear``.
    """

    momentum_start: float = 0.9999
    momentum_end: float = 1.0
    shape: Literal["constant", "cosine", "linear"] = "constant"

    def needs(self, encoder: Encoder) -> Needs:
        """Return its requirements: none."""
        return Needs(views={})

    def attach(self, model: PretrainModel) -> None:
        """Add the teacher."""
        if model.teachers.owner is not None:
            raise UserError(
                f"algorithms: '{model.teachers.owner}' has a teacher of its own, so ema_teacher "
                "has nothing to do. Remove one of them. (lut uses this teacher if it is listed "
                "after ema_teacher, with lut.momentum_start: null.)"
            )
        model.add_teacher(
            "ema_teacher", Momentum(self.momentum_start, self.momentum_end, self.shape)
        )
        for name in model.objectives:
            for student, teacher in model.objectives[name].averaged():
                model.teachers.mirror(student, teacher)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Write nothing: the teacher only follows."""
