"""Run by ``composer -n 2``: ranks whose disks and saves take different times."""

import os
import sys
import time
from pathlib import Path

from composer.utils import dist

from pospre.collectives import however_long, on_every_rank
from pospre.run.checkpoints.intervals import FIRST, AutoInterval
from pospre.run.checkpoints.saver import CheckpointSaver

TIMEOUT = 4.0


def meet(folder: Path) -> None:
    """Wait for the other rank: one may have started much later, and would be too late for gloo."""
    (folder / os.environ["RANK"]).touch()
    while len([*folder.iterdir()]) < 2:
        time.sleep(0.05)


def late() -> list[int]:
    """Return this rank's number; on the first rank, later than the others may wait."""
    if dist.get_global_rank() == 0:
        time.sleep(1.5 * TIMEOUT)
    return [dist.get_global_rank()]


def fail() -> None:
    """Fail on the first rank."""
    if dist.get_global_rank() == 0:
        raise OSError("the disk has gone")


if __name__ == "__main__":
    meet(Path(sys.argv[1]))
    dist.initialize_dist("cpu", timeout=TIMEOUT)
    assert however_long(late) == [dist.get_global_rank()]
    try:
        however_long(fail)
        assert dist.get_global_rank() == 1
    except OSError:
        assert dist.get_global_rank() == 0
    saver = CheckpointSaver(Path(sys.argv[1]), interval="1ep", keep=1)
    saver._writing = saver._thread.submit(late)  # type: ignore[arg-type]
    saver.wait()
    assert on_every_rank(lambda: saver._writing) == [None, None]
    auto = AutoInterval(3600.0, nodes=1)
    auto.fit_start(0)
    auto.begin()
    time.sleep(0.1 * dist.get_global_rank())  # a second rank that takes longer to save
    auto.end(FIRST)
    assert len(set(on_every_rank(lambda: auto.next))) == 1 and auto.next > FIRST
