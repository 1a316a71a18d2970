"""The progress of a run on stderr: remaining time, loss and images per second."""

import os
import sys
import time
from collections.abc import Mapping

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from tqdm import tqdm

from pospre.training.callbacks.metrics import is_late

PAUSE = 30.0
"""Seconds between lines if stderr is not a terminal."""

_BAR = "{remaining} left {percentage:3.0f}%|{bar}| {desc}"
_LINE = "{remaining} left, step {n_fmt}/{total_fmt}, {desc}"
_COLUMNS = 80  # of a terminal of unknown width
_WIDEST = 100  # a short bar is easier to read


class ProgressBar(Callback):
    """A bar over the whole run, drawn by rank 0 on a terminal; otherwise lines at intervals.

    Args:
        total_steps: number of steps of the run.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.bar: tqdm[None] | None = None
        self.first = (0.0, 0, 0)
        self.said = 0.0
        self._losses: Mapping[str, float] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the bar at the step to resume from."""
        self.said = time.monotonic()
        self.first = (self.said, state.timestamp.batch.value, state.timestamp.sample.value)
        if dist.get_global_rank() == 0 and sys.stderr.isatty():
            self.bar = tqdm(
                total=self.total_steps,
                initial=state.timestamp.batch.value,
                ncols=_columns(),
                nrows=2,  # it needs one; a terminal may report none
                smoothing=0.05,
                mininterval=0.2,
                bar_format=_BAR,
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Advance by a step."""
        if self.bar is not None:
            now = state.total_loss_dict
            known = self._losses if is_late(now) else now  # of the step before: nothing to wait for
            self._losses = now
            self.bar.ncols = _columns()
            self.bar.set_description_str(self._words(state, known), refresh=False)
            self.bar.update()
        elif time.monotonic() - self.said >= PAUSE:
            self._say(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Print where the run ends."""
        if self.bar is None:
            self._say(state)

    def close(self, state: State, logger: Logger) -> None:
        """Keep the bar, also if the run ends early."""
        if self.bar is not None:
            self.bar.close()

    def _say(self, state: State) -> None:
        self.said = time.monotonic()
        start, step, _ = self.first
        if dist.get_global_rank() == 0:
            line = tqdm.format_meter(
                state.timestamp.batch.value,
                self.total_steps,
                self.said - start,
                prefix=self._words(state, state.total_loss_dict),
                initial=step,
                bar_format=_LINE,
            )
            print(line, file=sys.stderr, flush=True)

    def _words(self, state: State, losses: Mapping[str, float]) -> str:
        start, _, samples = self.first
        rate = (state.timestamp.sample.value - samples) / (time.monotonic() - start)
        loss = losses.get("loss/train/total", float("nan"))
        epoch = state.previous_timestamp or state.timestamp  # of the finished step
        return f"epoch {epoch.epoch.value + 1}, loss {loss:.4f}, {rate:.0f} images/s"


def _columns() -> int:
    try:
        return min(os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS, _WIDEST)
    except OSError:
        return _COLUMNS
