"""Lives of a run: processes forked from a server that has imported torch already.

Starting Python with torch and Composer takes 6 to 10 s, and a certificate starts a run a dozen
times. The server (``multiprocessing``'s own) imports both once, with a single thread, which
``warm.py`` makes sure of; a fork of it trains a second later. SIGKILL goes to the fork, which is
a whole process of its own: it has its own memory, files and threads.
"""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SERVER = {  # with these no library starts a thread before the fork, and none touches a GPU
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_AFTER_ONE = 2.0  # seconds that the other ranks have to end by themselves


@dataclass(frozen=True)
class Order:
    """What a life is to do.

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


class Life:
    """One start of a run, on one or several ranks.

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


class Lives:
    """The server and the lives that are started from it.

    Args:
        live: what a life does with its order; a function of a module.
    """

    def __init__(self, live: Callable[[Order], None]) -> None:
        self._live = live
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pospre.certificate.warm"])
        before = {name: os.environ.pop(name) for name in _SERVER if name in os.environ}
        os.environ.update(_SERVER)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            for name in _SERVER:
                del os.environ[name]
            os.environ.update(before)

    def start(self, order: Order) -> Life:
        """Start a life on as many ranks as the order has records for."""
        ranks = len(order.records)
        port = _free_port() if ranks > 1 else 0
        processes = []
        for rank in range(ranks):
            variables = _rank_variables(rank, ranks, port) if ranks > 1 else {}
            process = self._context.Process(
                target=_begin, args=(self._live, order, variables, rank), daemon=True
            )
            process.start()
            processes.append(process)
        return Life(processes, order.records[0])


def _begin(
    live: Callable[[Order], None], order: Order, variables: Mapping[str, str], rank: int
) -> None:
    """Do in the new process what it is for, and leave with it when the parent has gone."""
    os.environ.update({**order.environment, **variables})
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="follow", daemon=True).start()
    live(order)


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
