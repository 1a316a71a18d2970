"""Commands in processes of their own, of which nothing is left when the test is over."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Fork

LIMIT = 240
"""Seconds for a command that starts torch, perhaps twice, on a busy machine."""


LAUNCHER = str(Path(__file__).with_name("launcher.py"))


def launcher(ranks: int) -> list[str]:
    """Return what stands before a program, or -m and a module, that so many ranks run."""
    return [sys.executable, LAUNCHER, "-n", str(ranks), "--master_port", str(free_port())]


def free_port() -> int:
    """Return a free TCP port, below those that the system gives to other tests meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def started(command: Sequence[str], **options: Any) -> "Iterator[subprocess.Popen[str]]":
    """Start a command in a session of its own; what still runs of it in the end is killed.

    Training, Composer's launcher, scripts and ``python -c`` are forks that have imported torch.
    Without the session the ranks would outlive their killed launcher, and slow down other tests.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    is_module, runs_pospre = command[1] == "-m", command[2:3] == ["pospre.train"]
    is_fork = command[0] == sys.executable and (runs_pospre or not is_module)
    start = Fork if is_fork else partial(subprocess.Popen, start_new_session=True)
    with start(command, **pipes | options) as process:
        try:
            yield process
        finally:
            kill(process)


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill a process of ``started`` with those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def finished(
    command: Sequence[str], limit: float = LIMIT, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; where that takes longer than ``limit``, the test fails."""
    with started(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            kill(process)
            output, errors = process.communicate()
            pytest.fail(f"ran for more than {limit} s:\n{output[-2000:]}{errors[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def until(is_so: Callable[[], Any], limit: float = 30) -> None:
    """Wait until something is so; where that takes longer than ``limit`` s, the test fails."""
    give_up = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.01)
