"""Keeps the loader where the run is."""

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.data.loader import ViewLoader


class LoaderPosition(Callback):
    """Keeps the loader where the run is, so that resuming neither replays nor skips a sample."""

    def __init__(self, loader: ViewLoader) -> None:
        self.loader = loader
        self._bad: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return what the order needs on another storage of the data set."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that order; older checkpoints say nothing, as theirs is this storage's."""
        if state:
            self.loader.load_state_dict(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Go to the sample after the last one trained; Composer must not replay those before."""
        time = state.timestamp
        samples = time.sample_in_epoch.value
        self.loader.load_state_dict({"epoch": time.epoch.value, "samples": samples})
        state.dataset_resumption["train"] = True

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Go to the start of the epoch."""
        self.loader.load_state_dict({"epoch": state.timestamp.epoch.value, "samples": 0})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log how many samples were left out since the start, as soon as there is one.

        They are counted over all ranks at the end of every epoch and of the run; in between a rank
        adds what it met itself.
        """
        if not self.loader.skips_bad:
            return
        self._bad.update(list(self.loader.bad))
        time = state.timestamp
        done = state.max_duration is not None and time >= state.max_duration
        if dist.get_world_size() > 1 and (done or time.batch_in_epoch == len(self.loader)):
            self._bad.update(*dist.all_gather_object(self._bad))
        if self._bad:
            logger.log_metrics({"data/bad_samples": len(self._bad)})
