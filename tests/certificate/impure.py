"""Processes that are not as they should be, for certificates that must be red."""

import os
from typing import Any

from composer.core import State

from pospre.batch import EPOCH, INDEX, Batch
from pospre.certificate.step_records import Job, train_observed
from pospre.nn.masking import PatchMasking
from pospre.run.resume import Resume


def draw_by_process(job: Job) -> None:
    """Draw masks that depend on the process, from the fifth step on."""
    draw = PatchMasking.draw

    def impure(self: PatchMasking, batch: Batch, seed: int) -> Batch:
        late = bool((batch[EPOCH] > 0).any())
        index = batch[INDEX]
        return draw(self, {**batch, INDEX: index + os.getpid() if late else index}, seed)

    PatchMasking.draw = impure  # type: ignore[method-assign]
    train_observed(job)


def forget_the_momenta(job: Job) -> None:
    """Go on without what the optimiser had noted."""
    load = Resume.before_load

    def forgetful(self: Resume, state: State, logger: Any) -> None:
        self._content["state"]["optimizers"]["AdamW"]["state"].clear()
        load(self, state, logger)

    Resume.before_load = forgetful  # type: ignore[method-assign]
    train_observed(job)
