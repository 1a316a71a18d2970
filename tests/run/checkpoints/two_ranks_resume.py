"""Run by ``composer -n 2``: a run that resumes, once from one file, once from two that differ.

The exit code is that of the last start, in which the second rank sees another file than the first.
"""

import shutil
import sys
from pathlib import Path

from composer.utils import dist

from pospre.errors import run_command
from pospre.run.checkpoints import reading
from pospre.train import main
from tests.training.tiny_runs import curve

RECIPE, RUNS, *OPTIONS = sys.argv[1:]
FOLDER = Path(RUNS) / "tiny" / "checkpoints"


def train() -> int:
    return run_command(lambda: main([RECIPE, *OPTIONS]))


def as_if_killed() -> None:
    """Leave the checkpoint before the last."""
    dist.barrier()
    if dist.get_global_rank() == 0:
        shutil.rmtree(FOLDER / "ep1-ba6")
    dist.barrier()


if __name__ == "__main__":
    assert train() == 0
    whole = curve(FOLDER.parent)
    as_if_killed()
    assert train() == 0
    assert curve(FOLDER.parent) == whole
    as_if_killed()
    read_same = reading._read_same
    reading._read_same = lambda place, *noted: read_same(
        str(Path(place).with_name("ep0-ba2")), *noted
    )
    sys.exit(train())
