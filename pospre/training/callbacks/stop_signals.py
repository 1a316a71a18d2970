"""SIGTERM and Ctrl-C while training: the step is finished and saved, and the run can go on."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.collectives import Greatest

_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # of two at once the later one here counts
_NOTICE = b"\nfinishing this step and saving; Ctrl-C once more stops at once\n"


class StopSignals(Callback):
    """Ends the training after a step, on all ranks after the same one.

    Composer's own handlers leave by ``sys.exit``, wherever the training is. Ours note the signal;
    those before come back when training ends. One rank may get its signal a step before another,
    or alone. So their CPUs exchange one number in each step, which no GPU waits for.

    Attributes:
        stopped: the signal that all ranks follow; None while there is none.
    """

    def __init__(self) -> None:
        self.stopped: signal.Signals | None = None
        self._seen = 0  # 1 + its place in _SIGNALS
        self._before: dict[signal.Signals, Any] = {}
        self._shared = Greatest()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Take the signals over."""
        for number in _SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: whoever started it handles signals
                return

    def give_back(self) -> None:
        """Put the handlers back that were there before the training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to compare notes."""
        self._shared.begin(self._seen)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Let this step be the last one, if any rank was told to stop when it began."""
        shared = self._shared.end()
        seen = self._seen if shared is None else shared
        if seen:
            self.follow(_SIGNALS[seen - 1], state)

    @property
    def seen(self) -> signal.Signals | None:
        """What this rank was told, of which the others may not know yet."""
        return _SIGNALS[self._seen - 1] if self._seen else None

    def follow(self, number: signal.Signals, state: State) -> None:
        """Let this step be the last one; on all ranks together."""
        self.stopped = number
        state.stop_training()  # the saver and the loggers take it for the end

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._seen and _SIGNALS[self._seen - 1] == number:
            os._exit(128 + number)
        if not self._seen and dist.get_global_rank() == 0:
            with suppress(OSError):  # whoever read this may be gone, and is why we stop
                os.write(2, _NOTICE)  # print may be in the middle of a line
        self._seen = max(self._seen, 1 + _SIGNALS.index(signal.Signals(number)))
