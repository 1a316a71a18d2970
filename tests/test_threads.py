"""OpenMP's threads do not spin while they wait, unless the user wants them to."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

OPENMP = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
"""GNU's OpenMP, which comes with torch; to load torch as well takes seconds."""


COMMAND = f"""
import ctypes, os
before = dict(os.environ)
import pospre.train
assert dict(os.environ) == before, "an import changes the process"
from pospre.errors import run_command
run_command(lambda: bool(ctypes.CDLL('{OPENMP}')))
"""


@pytest.mark.skipif(OPENMP is None, reason="torch is built with another OpenMP than GNU's")
@pytest.mark.parametrize(("wanted", "spins"), [(None, False), ("ACTIVE", True)])
def test_threads_wait_without_spinning(wanted: str | None, spins: bool) -> None:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    mine |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({"OMP_WAIT_POLICY": wanted} if wanted else {})
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        cwd=Path(__file__).parents[1],
        env=mine,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = re.search(r"GOMP_SPINCOUNT = '(\d+|INFINITE)'", done.stderr)
    assert told is not None and (told[1] != "0") == spins
