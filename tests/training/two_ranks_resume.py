"""Run by ``composer -n 2``: a whole run, one that goes on, one whose second rank sees another file.

The exit code is that of the last one.
"""

import shutil
import sys
from pathlib import Path

from composer.utils import dist

from pospre.errors import run_command
from pospre.train import main
from pospre.training import checkpoint_reading

RECIPE, RUNS, *OPTIONS = sys.argv[1:]


def train(name: str) -> int:
    return run_command(lambda: main([RECIPE, f"run_name={name}", *OPTIONS]))


def as_if_killed(name: str) -> None:
    """Remove the last checkpoint of a run."""
    dist.barrier()
    if dist.get_global_rank() == 0:
        (Path(RUNS) / name / "checkpoints" / "ep1-ba6.pt").unlink()
    dist.barrier()


if __name__ == "__main__":
    assert train("killed") == 0
    dist.barrier()
    if dist.get_global_rank() == 0:
        shutil.copytree(Path(RUNS) / "killed", Path(RUNS) / "whole")
    as_if_killed("killed")
    assert train("killed") == 0
    assert train("other") == 0
    as_if_killed("other")
    read_same = checkpoint_reading._read_same
    checkpoint_reading._read_same = lambda path, *noted: read_same(
        path.with_name("ep0-ba2.pt"), *noted
    )
    sys.exit(train("other"))
