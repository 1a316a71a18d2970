"""Python programs as forks of one process, which has imported once what takes 8 s.

``Fork`` stands for ``subprocess.Popen`` of a Python program; the process that it forks from is
started with the first of them, and ends with the tests.
"""

import atexit
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

_MOST = 1 << 20
"""Bytes of a request: a command line and its environment."""
ALONE = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Keeps libraries from starting threads, and torch from the GPU: what forks could not inherit."""


def preload() -> None:
    """Import what training needs, and prepare once what each process would at its first step."""
    import composer.cli.launcher  # noqa: F401

    find_composer_once()
    import pospre.certificate.fork_server_imports
    import pospre.evaluation.during_training
    import pospre.reporting.live_page
    import pospre.training.train  # noqa: F401


def find_composer_once() -> None:
    """Let Composer look for its own commit once: it asks all installed files at every save."""
    from composer.utils import collect_env

    vars(collect_env)["get_composer_commit_hash"] = cache(collect_env.get_composer_commit_hash)


def become(program: list[str]) -> NoReturn:
    """Be, in a fork, what ``python`` would be with these arguments, to the end."""
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
        request = {
            "program": args[1:],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(env or os.environ),
        }
        self.pid = _parent().ask(request, files)
        self._child_created = True
        for end in {given[12], given[14]} - {-1}:
            os.close(end)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        while True:
            ended, status = _parent().ask({"wait": self.pid})
            if ended or flags & os.WNOHANG:
                return ended, status
            time.sleep(0.01)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            ended, status = self._try_wait(os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Parent:
    """The process that the forks come from, as those see it who ask it for them."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[1])
        subprocess.Popen(
            [sys.executable, "-c", f"from tests.forks import _serve; _serve({theirs.fileno()})"],
            env=os.environ | {"PYTHONPATH": root} | ALONE,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def ask(self, request: dict[str, Any], files: list[int] | None = None) -> Any:
        """Send a request, and files that go with it; return the answer."""
        socket.send_fds(self._link, [json.dumps(request).encode()], files or [])
        return json.loads(self._link.recv(_MOST))


@cache
def _parent() -> _Parent:
    return _Parent()


def _serve(number: int) -> None:
    """Fork as often as asked, and tell how the forks ended, until the tests have ended."""
    preload()
    link = socket.socket(fileno=number)
    while True:
        message, files, _, _ = socket.recv_fds(link, _MOST, 2)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            answer: Any = os.waitpid(request["wait"], os.WNOHANG)
        else:
            answer = os.fork()
            if answer == 0:
                link.close()
                os.setsid()
                os.chdir(request["folder"])
                os.environ.clear()
                os.environ.update(request["environment"])
                for place, file in enumerate(files, 1):
                    os.dup2(file, place)
                    os.close(file)
                become(request["program"])
            for file in files:
                os.close(file)
            while os.getpgid(answer) != answer:
                time.sleep(0)  # who has it can kill its whole session
        link.send(json.dumps(answer).encode())
