"""Processes of a run, forked from a server that has imported torch, and how they are killed.

Starting Python with torch and Composer takes 6 to 10 s, and a certificate starts a run a dozen
times. The server (``multiprocessing``'s own) imports both once, with a single thread, which
``preload.py`` makes sure of; a fork of it trains a second later. SIGKILL goes to the fork, which
is a whole process: it has its own memory, files and threads.
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
_SERVER = {  # with these no library starts a thread before the fork, and none touches a GPU
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_AFTER_ONE = 2.0  # seconds that the other ranks have to end by themselves
_LOOK = 0.0005  # seconds between two looks for the moment of a kill
_MISSED = 4  # steps after which a save must have gone by unseen


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    Attributes:
        recipe: YAML file.
        overrides: ``key=value`` of it.
        records: where the observers write, by rank.
        values: where the final weights go.
        log: what is printed goes here.
        every_weight: hash the weights after every step.
        environment: variables of its own, such as a bucket's endpoint.
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
        begun: the last step that it was seen to begin, 0 for none.
        started: when it was, in seconds of the machine's clock.
    """

    def __init__(self, processes: list[Any], record: Path) -> None:
        self.begun = 0
        self._processes = processes
        self._record = record
        self._read = 0
        self.started = self._seen = time.monotonic()

    def look(self) -> None:
        """Read how far it has come."""
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
        """Return the seconds since it was started."""
        return time.monotonic() - self.started

    def since_begun(self) -> float:
        """Return the seconds since its last step was seen to begin."""
        return time.monotonic() - self._seen

    def is_alive(self) -> bool:
        """Tell whether it runs; where one rank has failed, the others are ended."""
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
        """Wait for the end; return the exit code, of several ranks the first that is not 0."""
        while self.is_alive():
            time.sleep(0.005)
        return next(filter(None, self._codes()), 0)

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]


class ProcessServer:
    """The server and the processes that are started from it.

    Args:
        work: what a process does with its job; a function of a module.
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
        """Start a process on as many ranks as the job has records for."""
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
    """Do in the new process what it is for, and leave with it when the parent has gone."""
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
    """Return what Composer's launcher tells a rank."""
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
    """A moment at which a process ends.

    Attributes:
        kind: ``step``: SIGKILL in the middle of a step; ``save``: while a checkpoint is written;
            ``start``: before the first step; ``SIGTERM``: told to stop, so that it saves first.
        step: which must have begun.
        delay: share of the time that a step, or the start, takes.
    """

    kind: str
    step: int
    delay: float


class Pace(NamedTuple):
    """How long things took undisturbed, in seconds.

    Attributes:
        start: from the beginning of a process to its first step.
        step: one step.
    """

    start: float
    step: float


def draw_kills(name: str, count: int, steps: int, seed: int) -> list[Kill]:
    """Return ``count`` moments in the order in which they come; all kinds, as far as they go.

    Args:
        name: of the run that is killed: each gets its own.
        count: of the moments.
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
    """Send a process a signal as soon as it is due and wait for its end; tell whether that was so.

    Args:
        process: that has just been started.
        is_due: asked all the time; sees how far the process has come.
        number: of the signal.

    Returns:
        False where it came to an end by itself before.
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
    """Tell whether the moment of a kill has come.

    Args:
        kill: the moment.
        process: that it ends.
        pace: what the delay is a share of.
        folder: of the local checkpoints, where a save shows.
    """
    if kill.kind == "start":
        return process.age() >= kill.delay * pace.start
    if process.begun < kill.step:
        return False
    if kill.kind == "save":
        return bool(incomplete(folder)) or process.begun > kill.step + _MISSED
    return process.since_begun() >= kill.delay * pace.step


def describe(kill: Kill, process: Process, folder: Path) -> str:
    """Say at which moment a kill has struck; it may have missed the one that it was meant for."""
    if kill.kind == "SIGTERM":
        return "by SIGTERM"
    if not process.begun:  # what is half written is of the process before
        return "before a step"
    return "in a save" if incomplete(folder) else "in a step"
