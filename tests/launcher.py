"""Composer's launcher, whose ranks are forks of one process: what takes 8 s is imported once.

It is started as ``python tests/launcher.py -n 2 …``, as ``composer -n 2 …`` would be.
"""

import atexit
import os
import runpy
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn


class Fork:
    """As much of a ``subprocess.Popen`` as the launcher asks for."""

    def __init__(
        self,
        args: list[str],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        text: bool = True,
    ) -> None:
        self.args, self.stdout, self.stderr = args, stdout, stderr
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            _run(args[1:])

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _run(program: list[str]) -> NoReturn:
    """Be what ``python`` would be with these arguments, to the end."""
    vars(subprocess)["Popen"] = POPEN
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # PYTHONUNBUFFERED=1
    code: Any = 0
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], str(Path.cwd())
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
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


POPEN = subprocess.Popen

if __name__ == "__main__":
    from composer.cli import launcher

    import pospre.evaluation.during_training
    import pospre.report.live
    import pospre.training.run  # noqa: F401

    vars(subprocess)["Popen"] = Fork
    sys.exit(launcher.main())
