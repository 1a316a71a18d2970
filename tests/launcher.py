"""Composer's launcher, whose ranks are forks of it: what takes 8 s is imported once.

It is started as ``python tests/launcher.py -n 2 …``, as ``composer -n 2 …`` would be.
"""

import os
import subprocess
import sys
from typing import IO

from tests.forks import become, preload


class Rank:
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
            vars(subprocess)["Popen"] = POPEN
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            become(args[1:])

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


POPEN = subprocess.Popen

if __name__ == "__main__":
    preload()
    from composer.cli import launcher

    vars(subprocess)["Popen"] = Rank
    sys.exit(launcher.main())
