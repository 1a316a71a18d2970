"""The file that each worker is processing, shown when it takes long or when a worker dies."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from multiprocessing import Value
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from signal import SIGTERM, Signals

from pospre.errors import printable

_LONGEST_NAME = 1 << 10
_FIRST_NOTICE = 10.0  # seconds, then twice as many, and so on
_LOOK_EVERY = 1.0

_here = threading.local()


class _Row(ctypes.Structure):
    """A worker's current file; ``since`` is 0 if it has none."""

    _fields_ = (
        ("pid", ctypes.c_long),
        ("since", ctypes.c_double),
        ("name", ctypes.c_char * _LONGEST_NAME),
    )

    @property
    def text(self) -> str:
        return printable(os.fsdecode(self.name))


class Activity:
    """The workers' current files, one row each, in shared memory."""

    def __init__(self, num_workers: int) -> None:
        self._rows = RawArray(_Row, num_workers)
        self._num_taken = Value("i", 0)

    def join(self) -> None:
        """Reserve a row for this thread, for use by ``at``."""
        with self._num_taken.get_lock():
            _here.row = self._rows[self._num_taken.value]
            self._num_taken.value += 1
        _here.row.pid = os.getpid()

    @contextmanager
    def watched(self) -> Generator[None]:
        """Print files that take long to standard error."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def causes(self, workers: Iterable[BaseProcess]) -> str:
        """Describe why, and at which files, workers died that were not stopped."""
        reasons = []
        for worker in workers:
            code = worker.exitcode or 0
            if code not in (0, -SIGTERM, 128 + SIGTERM):  # the last one with an inherited handler
                what = Signals(-code).name if code < 0 else f"exit code {code}"
                rows = [row for row in self._rows if row.pid == worker.pid and row.since]
                reasons.append(what + "".join(f" at {row.text}" for row in rows))
        return ", ".join(reasons)

    def _watch(self, done: threading.Event) -> None:
        notices = [_FIRST_NOTICE] * len(self._rows)
        while not done.wait(_LOOK_EVERY):
            for number, row in enumerate(self._rows):
                seconds = time.monotonic() - row.since if row.since else 0.0
                if seconds < _FIRST_NOTICE:
                    notices[number] = _FIRST_NOTICE
                elif seconds >= notices[number]:
                    notices[number] = 2 * seconds
                    print(f"still at {row.text}, {seconds:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def at(name: str) -> Generator[None]:
    """Record this thread's current file, if it has joined an ``Activity``."""
    row = getattr(_here, "row", None)
    if row is not None:
        row.name = os.fsencode(name)[1 - _LONGEST_NAME :]
        row.since = time.monotonic()
    yield
    if row is not None:
        row.since = 0.0  # kept after a failure: the message names the file
