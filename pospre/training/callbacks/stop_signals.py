"""SIGTERM and Ctrl-C during training: the step is finished and saved, so the run can resume."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.collectives import Greatest

_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # of two at once, the later one here counts
_NOTICE = b"\nfinishing this step and saving; Ctrl-C once more stops at once\n"


class StopSignals(Callback):
    """Ends the training on all ranks after the same step.

    Composer's own handlers call ``sys.exit`` at any point of the training. Ours record the signal;
    the previous handlers are restored when training ends. A rank may get its signal a step before
    another, or alone. So the ranks' CPUs exchange one number per step, which no GPU waits for.

    Attributes:
        stopped: the signal that all ranks follow; None: none.
        is_over: whether a callback has ended the run before its length.
    """

    def __init__(self) -> None:
        self.stopped: signal.Signals | None = None
        self.is_over = False
        self._seen = 0  # 1 + its index in _SIGNALS
        self._before: dict[signal.Signals, Any] = {}
        self._shared = Greatest()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Install the handlers."""
        for number in _SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: its starter handles signals
                return

    def give_back(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Start the exchange between ranks."""
        self._shared.begin(self._seen)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Make this step the last one, if any rank got a signal before it began."""
        shared = self._shared.end()
        seen = self._seen if shared is None else shared
        if seen:
            self.follow(_SIGNALS[seen - 1], state)

    @property
    def seen(self) -> signal.Signals | None:
        """The signal that this rank got, which the others may not have seen yet."""
        return _SIGNALS[self._seen - 1] if self._seen else None

    def follow(self, number: signal.Signals, state: State) -> None:
        """Make this step the last one, on all ranks together."""
        self.stopped = number
        state.stop_training()  # the saver and the loggers treat it as the end

    def end(self, state: State) -> None:
        """Make this step the last one of the whole run, on all ranks together."""
        self.is_over = True
        state.stop_training()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._seen and _SIGNALS[self._seen - 1] == number:
            os._exit(128 + number)
        if not self._seen and dist.get_global_rank() == 0:
            with suppress(OSError):  # the reader may be gone, which is why we stop
                os.write(2, _NOTICE)  # print may be in the middle of a line
        self._seen = max(self._seen, 1 + _SIGNALS.index(signal.Signals(number)))


class StageEnd(Callback):
    """Ends the training after a step, on all ranks, as if it were the last; it goes on anew."""

    def __init__(self, step: int) -> None:
        self.step = step

    def batch_end(self, state: State, logger: Logger) -> None:
        """Make the step the last one."""
        if state.timestamp.batch.value == self.step:
            state.stop_training()
