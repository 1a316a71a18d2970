"""Runs of a certificate: processes, forked from a server that has imported torch, and kills.

Starting Python with torch and Composer takes 6 to 10 s, and a certificate starts a run a dozen
times. ``multiprocessing``'s fork server imports both once, in a single thread (``prepare`` in
``step_records.py``). A fork of it starts training within a second. SIGKILL goes to the fork, which
is a complete process with its own memory, files and threads.
"""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from composer.utils import get_free_tcp_port

from pospre.certificate.step_records import PREPARE, Job
from pospre.run.checkpoints.folders import incomplete

# keeps libraries from starting threads before the fork, or from using a GPU
_SERVER = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SERVER |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", PREPARE: "1"}
_AFTER_ONE = 2.0  # seconds that the other ranks get to end by themselves
_LOOK = 0.002  # seconds between two checks for the time of a kill
_MISSED = 4  # steps after which a save must have been missed
KILLED, STOPPED = -9, 75  # exit codes


class Process:
    """One start of a run: a process for each of its ranks.

    Attributes:
        begun: the last step seen to begin; 0: none.
        started: when it started, in seconds of the machine's clock.
    """

    def __init__(self, processes: list[Any], record: Path) -> None:
        self.begun = 0
        self._processes = processes
        self._record = record
        self._read = 0
        self.started = self._seen = time.monotonic()

    def look(self) -> None:
        """Read its progress."""
        with suppress(FileNotFoundError), self._record.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole + end)
            for line in map(json.loads, whole.splitlines()):
                if "begun" in line:
                    self.begun, self._seen = line["begun"], time.monotonic()

    def age(self) -> float:
        """Return the seconds since its start."""
        return time.monotonic() - self.started

    def since_begun(self) -> float:
        """Return the seconds since its last step was seen to begin."""
        return time.monotonic() - self._seen

    def is_alive(self) -> bool:
        """Return whether it runs; if one rank has failed, end the others."""
        codes = self._codes()
        if any(codes) and None in codes:
            deadline = time.monotonic() + _AFTER_ONE
            while None in self._codes() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.end(signal.SIGKILL)
        return None in codes

    def end(self, number: int) -> None:
        """Send a signal to every rank."""
        for process in self._processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def wait(self) -> int:
        """Wait for the end; return the exit code, with several ranks the first that is not 0."""
        while self.is_alive():
            time.sleep(0.005)
        return next(filter(None, self._codes()), 0)

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]


def start(work: Callable[[Job], None], job: Job) -> Process:
    """Start a process on as many ranks as the job has records; each calls ``work``, of a module."""
    ranks, processes = len(job.records), []
    port = get_free_tcp_port() if ranks > 1 else 0
    for rank in range(ranks):
        variables = {  # as Composer's launcher sets them
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            **{"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        variables = variables if ranks > 1 else {}
        process = _server().Process(target=_begin, args=(work, job, variables), daemon=True)
        process.start()
        processes.append(process)
    return Process(processes, job.records[0])


@cache
def _server() -> multiprocessing.context.ForkServerContext:
    """Start the server; return what forks of it are made with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pospre.certificate.step_records"])
    before = {name: os.environ.pop(name) for name in _SERVER if name in os.environ}
    os.environ.update(_SERVER)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name in _SERVER:
            del os.environ[name]
        os.environ.update(before)
    return context


def _begin(work: Callable[[Job], None], job: Job, variables: Mapping[str, str]) -> None:
    """Run ``work`` in the new process, and exit when the parent has exited."""
    os.environ.update({**job.environment, **variables})
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="follow", daemon=True).start()
    work(job)


class Kill(NamedTuple):
    """A time at which a process ends.

    Its kind is ``step``: SIGKILL during a step; ``save``: while a checkpoint is written; ``start``:
    before the first step; or ``SIGTERM``: so that it saves and stops.
    """

    kind: str
    step: int  # that must have begun
    delay: float  # as a share of the duration of a step, or of the start


class Pace(NamedTuple):
    """Undisturbed seconds from the start of a process to its first step, and of a step."""

    start: float
    step: float


def send_when_due(
    process: Process, is_due: Callable[[], bool], number: int = signal.SIGKILL
) -> bool:
    """Send a process a signal when due, and wait for its end; False: it ended by itself before."""
    while process.is_alive():
        process.look()
        if is_due():
            process.end(number)
            process.wait()
            process.look()
            return True
        time.sleep(_LOOK)
    return False


def is_due(kill: Kill, process: Process, pace: Pace, folder: Path) -> bool:
    """Return whether a kill is due; ``folder`` holds the local checkpoints, and shows a save."""
    if kill.kind == "start":
        return process.age() >= kill.delay * pace.start
    if process.begun < kill.step:
        return False
    if kill.kind == "save":
        return bool(incomplete(folder)) or process.begun > kill.step + _MISSED
    return process.since_begun() >= kill.delay * pace.step


def describe(kill: Kill, process: Process, folder: Path) -> str:
    """Describe when a kill hit; it may have missed its intended time."""
    if kill.kind == "SIGTERM":
        return "by SIGTERM"
    if not process.begun:  # half-written files are the previous process's
        return "before a step"
    return "in a save" if incomplete(folder) else "in a step"
