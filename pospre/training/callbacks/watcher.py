"""Base of monitoring callbacks: when they check, and how they warn."""

import contextlib
import json
import sys
import time
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from tqdm import tqdm

from pospre.training.callbacks.metrics import drop_after

WARNINGS = "watch.jsonl"
"""The file with a run's warnings, in its folder."""


class Watcher(Callback):
    """Warns on stderr, and in a file if there is one; each problem once, until it is over.

    Args:
        log: file for a JSON line per warning: ``step``, ``time`` (seconds since 1970), ``watch``
            (the name of the class) and ``warning``.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.log = log
        self._troubled: set[str] = set()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the warnings of steps that will be trained again."""
        if self.log is not None and dist.get_global_rank() == 0:
            drop_after(self.log, state.timestamp.batch.value)

    def judge(self, step: int, trouble: str, warning: str | None) -> None:
        """Warn when a problem begins; ``warning`` is None while there is none."""
        if warning is None:
            self._troubled.discard(trouble)
        elif trouble not in self._troubled:
            self._troubled.add(trouble)
            self.warn(step, warning)

    def warn(self, step: int, warning: str) -> None:
        """Write one line, on rank 0."""
        if dist.get_global_rank() == 0:
            tqdm.write(f"warning: step {step}: {warning}", file=sys.stderr)  # above a progress bar
            note(self.log, step, type(self).__name__, warning)


def note(log: Path | None, step: int, watch: str, warning: str) -> None:
    """Append a warning to a file, if there is one; a full disk is ignored."""
    if log is None:
        return
    line = {"step": step, "time": round(time.time(), 3), "watch": watch, "warning": warning}
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def is_due(step: int, interval: int, every: int = 1) -> bool:
    """Return whether to check at ``step``: the first, and the first logged one of every ``every``.

    Args:
        step: counted from 1.
        interval: steps between lines of ``metrics.jsonl``: only then may the host wait for a GPU.
        every: steps between checks.
    """
    return step == 1 or (step % interval == 0 and step // every > (step - interval) // every)
