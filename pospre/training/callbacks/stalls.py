"""Time per activity of a run, and where it hangs if no step finishes."""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import dist

from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.training.callbacks.metrics import wait_for
from pospre.training.callbacks.watchers import Watcher, is_due, note

# activities, each starting at an event and lasting until the next
_PHASES = {
    Event.FIT_START: "step",
    Event.EPOCH_START: "data",
    Event.BEFORE_DATALOADER: "data",
    Event.AFTER_DATALOADER: "step",
    Event.BATCH_END: "evaluation",
    Event.BATCH_CHECKPOINT: "save",
    Event.EPOCH_END: "evaluation",
    Event.EPOCH_CHECKPOINT: "save",
}
_PATIENT = 5  # factor for the first step (compilation) and for evaluations
_DEPTH = 4  # number of functions in a line


class Stalls(Watcher):
    """Logs shares of wall time, and warns if the loader or anything else delays training.

    ``time/data`` is the wait for batches (of the slowest rank, for which all wait), ``time/save``
    for checkpoints, ``time/evaluation`` for evaluations and other callbacks, and ``time/step`` the
    rest. They sum to 1, and each line covers the time since the previous one. It must come first,
    so that other callbacks' time is counted where they run. With another saver than ours,
    everything after a step counts as saving.

    A thread on every rank reports if no step has finished for a long time, and the functions that
    the training is in; it reports again after twice that time.

    Args:
        loader_share: share of ``time/data`` above which to warn.
        patience: seconds above it before the warning.
        silence: seconds without a finished step before the thread reports; five times as long for
            the first step and for evaluations, and at least the duration of five steps.
        interval: steps between lines.
        log: see ``Watcher``.
    """

    def __init__(
        self,
        *,
        loader_share: float = 0.3,
        patience: float = 60.0,
        silence: float = 120.0,
        interval: int = 10,
        log: Path | None = None,
    ) -> None:
        super().__init__(log)
        self.loader_share, self.patience, self.interval = loader_share, patience, interval
        self._watchdog = _Watchdog(silence, log)
        self._seconds = dict.fromkeys(_PHASES.values(), 0.0)
        self._phase = "step"
        self._since: float | None = None
        self._hears_of_saves = False
        self._waited = self._over = 0.0  # of the time that the loader has been too slow

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Add the time since the last event to its activity."""
        if event == Event.BATCH_END and is_due(state.timestamp.batch.value, self.interval):
            wait_for(state.total_loss_dict)  # otherwise others would wait: this is step time
        if event in _PHASES:
            phase = _PHASES[event]
            self._begin("evaluation" if phase == "save" and self._hears_of_saves else phase)
        super().run_event(event, state, logger)

    def _begin(self, phase: str) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self._watchdog.phase = phase

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start watching this thread."""
        super().fit_start(state, logger)
        self._hears_of_saves = any(isinstance(each, CheckpointSaver) for each in state.callbacks)
        self._watchdog.start()

    def before_save(self, state: State) -> None:
        """Count the time from here on as saving, including that of other callbacks' checks."""
        self._begin("save")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Record the end of a step; log the shares, and check the loader's."""
        step = state.timestamp.batch.value
        self._watchdog.beat(step)
        if not is_due(step, self.interval):
            return
        total = max(sum(self._seconds.values()), 1e-9)
        shares = {phase: seconds / total for phase, seconds in self._seconds.items()}
        logger.log_metrics({f"time/{phase}": round(shares[phase], 4) for phase in shares})
        self._judge(step, total)
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    def close(self, state: State, logger: Logger) -> None:
        """Stop the thread."""
        self._watchdog.stop()

    def _judge(self, step: int, total: float) -> None:
        if self._seconds["data"] <= self.loader_share * total:
            self._waited = self._over = 0.0
            self.judge(step, "loader", None)
            return
        self._waited += self._seconds["data"]
        self._over += total
        if self._over >= self.patience:
            recipe = "RECIPE" if self.log is None else self.log.with_name("recipe.yaml")
            self.judge(
                step,
                "loader",
                f"{self._waited / self._over:.0%} of the last {self._over:.0f} s went to waiting "
                f"for the loader; `python -m pospre.loader_report {recipe}` shows what takes how "
                "long, and what would make it faster",
            )


class _Watchdog:
    """Checks from its own thread whether another one still finishes steps."""

    def __init__(self, silence: float, log: Path | None) -> None:
        self.silence = silence
        self.log = log
        self.phase = "step"
        self._ended = threading.Event()
        self._step, self._longest, self._steps = 0, 0.0, 0
        self._beat = self._warned = 0.0

    def start(self) -> None:
        """Start watching the calling thread."""
        self._beat = time.monotonic()
        self._ended.clear()
        watched = threading.get_ident()
        threading.Thread(target=self._watch, args=(watched,), daemon=True).start()

    def beat(self, step: int) -> None:
        """Record the end of a step."""
        now = time.monotonic()
        if self._steps:  # the first one may compile
            self._longest = max(self._longest, now - self._beat)
        self._step, self._steps = step, self._steps + 1
        self._beat, self._warned = now, 0.0

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()

    def _watch(self, watched: int) -> None:
        while not self._ended.wait(self.silence / 8):
            silent = time.monotonic() - self._beat
            frame = sys._current_frames().get(watched)
            if frame is not None and silent > self._limit():
                self._warned = silent
                self._say(silent, where(frame))

    def _limit(self) -> float:
        is_patient = not self._steps or self.phase == "evaluation"
        limit = max(self.silence * (_PATIENT if is_patient else 1), _PATIENT * self._longest)
        return max(limit, 2 * self._warned)

    def _say(self, silent: float, stack: str) -> None:
        step, rank = self._step, dist.get_global_rank()
        who = f"rank {rank}" if dist.get_world_size() > 1 else "the training"
        text = f"no step has ended for {silent:.0f} s; {who} is in {self.phase}: {stack}"
        print(f"warning: step {step}: {text}", file=sys.stderr, flush=True)
        if rank == 0:
            note(self.log, step, Stalls.__name__, text)


def where(frame: FrameType) -> str:
    """Return the innermost functions of a thread, and the innermost of this package, in a line."""
    stack = traceback.extract_stack(frame)[::-1]
    named = stack[:_DEPTH]
    package = f"{os.sep}pospre{os.sep}"
    ours = next((entry for entry in stack if package in entry.filename), None)
    if ours is not None and ours not in named:
        named = [*named[:-1], ours]
    files = ("/".join(Path(entry.filename).parts[-2:]) for entry in named)
    return " < ".join(
        f"{entry.name} ({file}:{entry.lineno})" for entry, file in zip(named, files, strict=True)
    )
