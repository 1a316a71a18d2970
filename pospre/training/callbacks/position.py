"""Keeps the loader where the run is, so that resuming neither replays nor skips a sample."""

from composer.core import Callback, State
from composer.loggers import Logger

from pospre.data.loader import ViewLoader


class LoaderPosition(Callback):
    """Sets the loader's epoch and how many of its samples are already trained."""

    def __init__(self, loader: ViewLoader) -> None:
        self.loader = loader

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
        """Log how many samples this rank has left out so far, as soon as there is one."""
        if self.loader.bad:
            logger.log_metrics({"data/bad_samples": len(self.loader.bad)})
