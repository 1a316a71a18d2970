"""Python programs as forks of one process, which has imported once what takes 8 s.

``Fork`` stands for ``subprocess.Popen`` of a Python program; the process that it forks from is
started with the first of them, and ends with the tests. If several processes run the tests, they
are forks, too: ``python -m tests.forks -u -c …`` starts one.
"""

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

SHARED = "POSPRE_TEST_FORKS"
"""The environment variable with the address of the process that all tests fork from."""
_MOST = 1 << 20
"""Bytes of a request: a command line and its environment."""
ALONE = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Keeps libraries from starting threads, and torch from the GPU: what forks could not inherit."""


@cache
def preload() -> None:
    """Import what training needs, and prepare what each process would at its first step.

    Once: a fork that calls it has all that.
    """
    import composer.cli.launcher  # noqa: F401

    find_composer_once()
    import pospre.certificate.step_records
    import pospre.evaluation.during_training
    import pospre.reporting.live_page
    import pospre.training.train

    pospre.certificate.step_records.prepare()


def find_composer_once() -> None:
    """Let Composer look for its own commit once: it asks all installed files at every save."""
    from composer.utils import collect_env

    vars(collect_env)["get_composer_commit_hash"] = cache(collect_env.get_composer_commit_hash)


def become(program: list[str]) -> NoReturn:
    """Be, in a fork, what ``python`` would be with these arguments, to the end."""
    import torch

    # torch makes its pool of threads anew after a fork; two threads that ask at once crash
    torch.set_num_threads(torch.get_num_threads())
    random.seed()  # no two processes draw the same unless they are told to
    np.random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            write_through=bool(os.environ.get("PYTHONUNBUFFERED"))
        )
    code: Any = 0
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], str(Path.cwd())
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        elif program[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *program[2:]], str(Path.cwd())
            exec(program[1], vars(sys.modules["__main__"]))
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).parent)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


class Fork(subprocess.Popen[str]):
    """A ``Popen`` of a Python program in a session of its own, which starts at once."""

    def _execute_child(self, args: list[str], *given: Any) -> None:
        cwd, env = given[4:6]
        # the ends of the pipes that it writes to; without one, what this process has
        files = [own if end == -1 else end for own, end in ((1, given[12]), (2, given[14]))]
        self.pid = _parent().fork(args[1:], files, str(cwd or Path.cwd()), env or os.environ)
        self._child_created = True
        for end in {given[12], given[14]} - {-1}:
            os.close(end)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        return _parent().wait(self.pid, flags)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            ended, status = self._try_wait(os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Parent:
    """The process that the forks come from, as those see it who ask it for them."""

    def __init__(self, address: str) -> None:
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(f"\0{address}")

    def fork(
        self, program: list[str], files: Sequence[int], folder: str, environment: Mapping[str, str]
    ) -> int:
        """Return the number of a new process; ``files`` are its last standard streams."""
        request = {"program": program, "folder": folder, "environment": dict(environment)}
        return int(self._ask(request, files))

    def wait(self, process: int, flags: int = 0) -> tuple[int, int]:
        """Wait for the end of a fork, as ``os.waitpid`` does."""
        if not flags & os.WNOHANG:
            end = os.pidfd_open(process)
            try:
                select.select([end], [], [])
            finally:
                os.close(end)
        ended, status = self._ask({"wait": process})
        return ended, status

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        """Send a request, and files that go with it; return the answer."""
        socket.send_fds(self._link, [json.dumps(request).encode()], [*files])
        return json.loads(self._link.recv(_MOST))


@cache
def _parent() -> _Parent:
    return _Parent(os.environ.get(SHARED) or start())


def start() -> str:
    """Start the process that others fork from; return its address. It ends with this process."""
    address = f"pospre-tests-{os.getpid()}"
    life, _ = os.pipe()  # the other end is closed when this process ends
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        given = listener.fileno(), life
        subprocess.Popen(
            [sys.executable, "-c", f"from tests.forks import _serve; _serve{given}"],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | ALONE,
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.close(life)
    return address


def _serve(listening: int, life: int) -> None:
    """Fork as often as asked, and tell how the forks ended, until the tests have ended."""
    preload()
    gc.collect()
    gc.freeze()  # forks share what was imported, and no longer look at it
    listener = socket.socket(fileno=listening)
    links: dict[int, socket.socket] = {}
    while True:
        for ready in select.select([life, listening, *links], [], [])[0]:
            if ready == life:
                return
            if ready == listening:
                link, _ = listener.accept()
                links[link.fileno()] = link
                continue
            message, files, _, _ = socket.recv_fds(links[ready], _MOST, 3)
            if not message:
                links.pop(ready).close()
                continue
            answer = _answer(json.loads(message), files, [life, listening, *links])
            links[ready].send(json.dumps(answer).encode())


def _answer(request: dict[str, Any], files: list[int], own: list[int]) -> Any:
    """Fork, or look whether a fork has ended; ``own`` files are not a fork's."""
    if "wait" in request:
        return os.waitpid(request["wait"], os.WNOHANG)
    process = os.fork()
    if process == 0:
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for place, file in enumerate(files, 3 - len(files)):
            os.dup2(file, place)
        for file in (*files, *own):
            os.close(file)
        become(request["program"])
    for file in files:
        os.close(file)
    while os.getpgid(process) != process:
        time.sleep(0)  # who has it can kill its whole session
    return process


def _stand_in(program: list[str]) -> int:
    """Start a fork with this process's standard streams; return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the fork ends it
    process = _parent().fork(program, (0, 1, 2), str(Path.cwd()), os.environ)
    return os.waitstatus_to_exitcode(_parent().wait(process)[1])


if __name__ == "__main__":
    sys.exit(_stand_in(sys.argv[2:]))  # without -u
