"""Messages about the compiled step: that it compiles, for how long, and its problems."""

import logging
import sys
import time
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch._dynamo.utils import counters, graph_break_reasons
from tqdm import tqdm

_DYNAMO = logging.getLogger("torch._dynamo.convert_frame")


class Compiling(Callback):
    """Reports how long the first step compiles, graph breaks, and when torch stops compiling.

    Args:
        parts: the compiled parts, see ``compile_model``.
        cache: the folder that keeps compiled code between starts.
    """

    def __init__(self, parts: str, cache: str) -> None:
        self.parts, self.cache = parts, cache
        self.began: float | None = None
        self.told = len(graph_break_reasons)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start listening to torch's messages about too many compilations."""
        _DYNAMO.addFilter(_shorten)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Announce before the first step that it takes longer."""
        if self.began is None:
            self.began = time.monotonic()
            _say(f"compiling the {self.parts}: the first step takes longer, up to some minutes")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Report the duration of the first step, and after each step new graph breaks."""
        if self.began is not None and self.began > 0:
            seconds, self.began = time.monotonic() - self.began, 0.0
            graphs = counters["stats"]["unique_graphs"]
            _say(
                f"the first step took {seconds:.1f} s, with {graphs} compiled graph"
                f"{'s' * (graphs != 1)}; they are kept in {self.cache}"
            )
        for line in dict.fromkeys(map(_describe, graph_break_reasons[self.told :])):
            _say(f"warning: the compiled graph breaks {line}")
        self.told = len(graph_break_reasons)

    def close(self, state: State, logger: Logger) -> None:
        """Restore torch's log."""
        _DYNAMO.removeFilter(_shorten)


def _describe(found: object) -> str:
    """Return the place of a graph break, and torch's reason in a line."""
    stack, reason = getattr(found, "user_stack", []), str(getattr(found, "reason", found))
    where = f"at {Path(stack[-1].filename)}:{stack[-1].lineno}: " if stack else ""
    return where + " ".join(reason.split())[:200]


def _shorten(record: logging.LogRecord) -> bool:
    """Shorten torch's message that a function is no longer compiled; pass on all others."""
    if not str(record.msg).startswith("torch._dynamo hit config."):
        return True
    kind, limit, function, reason, *_ = (str(each) for each in record.args or ())
    _say(
        f"warning: {function} was compiled {limit} times ({kind}) and runs uncompiled from here "
        f"on; what changed last: {' '.join(reason.split())[:200]}. trainer.compile=false stops it"
    )
    return False


def _say(text: str) -> None:
    """Write a line on rank 0, above a progress bar."""
    if dist.get_global_rank() == 0:
        tqdm.write(text, file=sys.stderr)
