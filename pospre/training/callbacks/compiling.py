"""What a run says of its compiled step: that it compiles, for how long, and what went wrong."""

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
    """Says how long the first step compiles, where its graph breaks, and when it is given up.

    Args:
        parts: what is compiled, see ``compile_model``.
        cache: the folder that keeps it between starts.
    """

    def __init__(self, parts: str, cache: str) -> None:
        self.parts, self.cache = parts, cache
        self.began: float | None = None
        self.told = len(graph_break_reasons)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begin to listen for what torch says of too many compilations."""
        _DYNAMO.addFilter(_shorten)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Say before the first step that it takes longer."""
        if self.began is None:
            self.began = time.monotonic()
            _say(f"compiling the {self.parts}: the first step takes longer, up to some minutes")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Say after the first step how long it took; after each, which breaks are new."""
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
        """Leave torch's log as it was."""
        _DYNAMO.removeFilter(_shorten)


def _describe(found: object) -> str:
    """Return where a graph breaks, and torch's reason in a line."""
    stack, reason = getattr(found, "user_stack", []), str(getattr(found, "reason", found))
    where = f"at {Path(stack[-1].filename)}:{stack[-1].lineno}: " if stack else ""
    return where + " ".join(reason.split())[:200]


def _shorten(record: logging.LogRecord) -> bool:
    """Say in one line that a function is not compiled any more; all else is torch's to say."""
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
