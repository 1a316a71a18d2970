"""The report page while a run goes on: written again every minute, with the first step's views."""

import sys
import time
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.batch import numbered
from pospre.errors import UserError
from pospre.model.algorithm import pretrain_model
from pospre.report.page import write_report
from pospre.report.views import FOLDER, INDEX, NUM_SAMPLES, can_draw, draw_views

EVERY = 60.0  # seconds between two pages
SHARE = 0.01  # of the time that they may take


class LivePage(Callback):
    """Draws what the first step saw, and writes the page again while training.

    Only rank 0 does. What fails is said once, and training goes on.

    Args:
        folder: the run's.
        every: seconds between two pages; more of a long run, whose page takes long.
    """

    def __init__(self, folder: Path, every: float = EVERY) -> None:
        self.folder, self.every = folder, every
        self._next = time.monotonic() + every
        self._failed = False
        self._drawn = (folder / FOLDER / INDEX).exists()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Draw and write what is due."""
        if dist.get_global_rank() != 0 or self._failed:
            return
        try:
            if not self._drawn:
                self._draw(state)
                self._drawn = True
            if (start := time.monotonic()) >= self._next:
                write_report(self.folder, refresh=max(1, round(self.every)))
                spent = time.monotonic() - start
                self._next = start + max(self.every, spent / SHARE)
        except (UserError, OSError) as error:
            self._failed = True
            print(f"the report is not written while training: {error}", file=sys.stderr)

    def _draw(self, state: State) -> None:
        model = pretrain_model(state)
        if not can_draw(model):
            return
        assert state.previous_timestamp is not None
        few = {key: value[:NUM_SAMPLES] for key, value in state.batch.items()}
        few = numbered(few, epoch=state.previous_timestamp.epoch.value)
        few = state.device.batch_to_device(few)
        step = state.timestamp.batch.value
        draw_views(model, state.algorithms, few, self.folder / FOLDER, step=step)
