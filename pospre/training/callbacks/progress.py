"""The progress bar: loss, images per second and the time left."""

import sys
import time

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from tqdm import tqdm


class ProgressBar(Callback):
    """One bar over the whole run, drawn by rank 0 on stderr.

    Args:
        total_steps: number of steps of the run.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.bar: tqdm[None] | None = None
        self.first = (0.0, 0)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the bar at the step to go on from."""
        self.first = (time.monotonic(), state.timestamp.sample.value)
        if dist.get_global_rank() == 0:
            self.bar = tqdm(
                total=self.total_steps,
                initial=state.timestamp.batch.value,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.05,
                mininterval=0.2 if sys.stderr.isatty() else 10.0,
                bar_format="{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} steps"
                "{postfix} [{elapsed} elapsed, {remaining} left]",
            )

    def batch_end(self, state: State, logger: Logger) -> None:
        """Advance by a step."""
        if self.bar is None:
            return
        losses = state.total_loss_dict
        seconds = time.monotonic() - self.first[0]
        rate = (state.timestamp.sample.value - self.first[1]) / seconds
        self.bar.set_description_str(f"epoch {state.timestamp.epoch.value + 1}", refresh=False)
        self.bar.set_postfix_str(
            f"loss {losses.get('loss/train/total', float('nan')):.4f}, {rate:.1f} images/s",
            refresh=False,
        )
        self.bar.update()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
