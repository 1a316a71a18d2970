"""Processes of a run, forked from a server that has imported torch, and their kills.

Starting Python with torch and Composer takes 6 to 10 s, and a certificate starts a run a dozen
times. The server (``multiprocessing``'s own) imports both once, in a single thread, as
``preload.py`` ensures. A fork of it starts training within a second. SIGKILL goes to the fork,
which is a complete process with its own memory, files and threads.
"""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pospre.run.checkpoints.finding import incomplete

KINDS = ("step", "save", "start", "SIGTERM")
_SERVER = {  # keeps libraries from starting threads before the fork, or from using a GPU
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_AFTER_ONE = 2.0  # seconds that the other ranks get to end by themselves
_LOOK = 0.0005  # seconds between two checks for the time of a kill
_MISSED = 4  # steps after which a save must have been missed


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        recipe: YAML file.
        overrides: ``key=value`` for it.
        records: files of the observers, by rank.
        values: file for the final weights.
        log: file for the output.
        every_weight: hash the weights after every step.
        environment: extra variables, such as a bucket's endpoint.
    """

    recipe: str
    overrides: tuple[str, ...]
    records: tuple[Path, ...]
    values: Path
    log: Path
    every_weight: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """One start of a run: a process for each of its ranks.

    Attributes:
        begun: the last step seen to begin; 0: none.
        started: when that was, in seconds of the machine's clock.
    """

    def __init__(self, processes: list[Any], record: Path) -> None:
        self.begun = 0
        self._processes = processes
        self._record = record
        self._read = 0
        self.started = self._seen = time.monotonic()

    def look(self) -> None:
        """Read its progress."""
        try:
            with self._record.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
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


class ProcessServer:
    """The server and the processes started from it.

    Args:
        work: a module's function that a process calls with its job.
    """

    def __init__(self, work: Callable[[Job], None]) -> None:
        self._work = work
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pospre.certificate.preload"])
        before = {name: os.environ.pop(name) for name in _SERVER if name in os.environ}
        os.environ.update(_SERVER)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            for name in _SERVER:
                del os.environ[name]
            os.environ.update(before)

    def start(self, job: Job) -> Process:
        """Start a process on as many ranks as the job has records."""
        ranks = len(job.records)
        port = _free_port() if ranks > 1 else 0
        processes = []
        for rank in range(ranks):
            variables = _rank_variables(rank, ranks, port) if ranks > 1 else {}
            process = self._context.Process(
                target=_begin, args=(self._work, job, variables, rank), daemon=True
            )
            process.start()
            processes.append(process)
        return Process(processes, job.records[0])


def _begin(work: Callable[[Job], None], job: Job, variables: Mapping[str, str], rank: int) -> None:
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


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that Composer's launcher sets for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Kill(NamedTuple):
    """A time at which a process ends.

    Attributes:
        kind: ``step``: SIGKILL during a step; ``save``: while a checkpoint is written; ``start``:
            before the first step; ``SIGTERM``: so that it saves and stops.
        step: the step that must have begun.
        delay: share of the duration of a step, or of the start.
    """

    kind: str
    step: int
    delay: float


class Pace(NamedTuple):
    """Undisturbed durations, in seconds.

    Attributes:
        start: from the start of a process to its first step.
        step: one step.
    """

    start: float
    step: float


def draw_kills(name: str, count: int, steps: int, seed: int) -> list[Kill]:
    """Return ``count`` kills in order of time, of all kinds if there are enough.

    Args:
        name: of the killed run: each gets its own draws.
        count: number of kills.
        steps: of the whole run.
        seed: of the draws.
    """
    draws = random.Random(f"{seed}/{name}")
    kinds = [KINDS[place % len(KINDS)] for place in range(count)]
    draws.shuffle(kinds)
    moments = sorted(draws.randint(1, max(1, steps - 2)) for _ in kinds)
    return [Kill(kind, step, draws.random()) for kind, step in zip(kinds, moments, strict=True)]


def send_when_due(
    process: Process, is_due: Callable[[], bool], number: int = signal.SIGKILL
) -> bool:
    """Send a process a signal when due, and wait for its end; return whether it was sent.

    Args:
        process: just started.
        is_due: polled with the process's progress.
        number: of the signal.

    Returns:
        False if the process ended by itself before.
    """
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
    """Return whether a kill is due.

    Args:
        kill: the kill.
        process: the process to kill.
        pace: the durations that the delay is a share of.
        folder: of the local checkpoints, where a save is visible.
    """
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
