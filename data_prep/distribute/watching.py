"""Which file every worker is at: named while it takes long, and when a worker dies of it."""

import os
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from multiprocessing import Value
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from signal import SIGTERM, Signals
from typing import TextIO

_LONGEST_NAME = 1 << 10
_PATIENCE = 10.0  # seconds, then twice as many, and so on
_LOOK_EVERY = 1.0
_STANDARD_ERROR = 2

_here = threading.local()


class Board:
    """What the workers are at, one row each, in memory that their processes share."""

    def __init__(self, num_workers: int) -> None:
        self._pids = RawArray("l", num_workers)
        self._since = RawArray("d", num_workers)  # 0: at nothing
        self._names = [RawArray("c", _LONGEST_NAME) for _ in range(num_workers)]
        self._num_taken = Value("i", 0)

    def join(self) -> None:
        """Take a row for this thread; ``at`` writes into it."""
        with self._num_taken.get_lock():
            row = self._num_taken.value
            self._num_taken.value += 1
        self._pids[row] = os.getpid()
        _here.row = self, row

    @contextmanager
    def joined(self) -> Generator[None]:
        """Take a row for this thread meanwhile."""
        self.join()
        try:
            yield
        finally:
            _here.row = None, 0

    def begin(self, row: int, name: str) -> None:
        """Note what a row's worker is at."""
        self._names[row].value = os.fsencode(name)[1 - _LONGEST_NAME :]
        self._since[row] = time.monotonic()

    def end(self, row: int) -> None:
        """Note that it is done."""
        self._since[row] = 0.0

    @contextmanager
    def watched(self) -> Generator[None]:
        """Name on the standard error, meanwhile, what takes long."""
        done = threading.Event()
        # a copy: while a file is decoded here, what libraries write there is taken for its own
        with os.fdopen(os.dup(_STANDARD_ERROR), "w", errors="backslashreplace") as stream:
            thread = threading.Thread(target=self._watch, args=(done, stream), daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    def died(self, workers: Iterable[BaseProcess]) -> str:
        """Say of what and at which files those of the ended workers died that were not told to."""
        told = []
        for worker in workers:
            code = worker.exitcode or 0
            if code not in (0, -SIGTERM, 128 + SIGTERM):  # the last where a handler is inherited
                what = Signals(-code).name if code < 0 else f"exit code {code}"
                rows = [row for row, pid in enumerate(self._pids) if pid == worker.pid]
                names = [self._name(row) for row in rows if self._since[row]]
                told.append(what + "".join(f" at {name}" for name in names))
        return ", ".join(told)

    def _name(self, row: int) -> str:
        return os.fsdecode(self._names[row].value)

    def _watch(self, done: threading.Event, stream: TextIO) -> None:
        patience = [_PATIENCE] * len(self._since)
        while not done.wait(_LOOK_EVERY):
            for row, since in enumerate(self._since):
                seconds = time.monotonic() - since if since else 0.0
                if seconds < _PATIENCE:
                    patience[row] = _PATIENCE
                elif seconds >= patience[row]:
                    patience[row] = 2 * seconds
                    print(f"still at {self._name(row)}, {seconds:.0f} s", file=stream, flush=True)


@contextmanager
def at(name: str) -> Generator[None]:
    """Note on the board, if this thread has joined one, what it is at."""
    board, row = getattr(_here, "row", (None, 0))
    if board is None:
        yield
        return
    board.begin(row, name)
    yield
    board.end(row)  # not where it fails: what it was at is of interest
