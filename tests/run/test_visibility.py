"""Shards are refused on disks that the nodes do not share."""

from pathlib import Path

from tests.processes import finished, launcher
from tests.training.tiny_runs import environment


def test_two_nodes_with_one_disk_and_with_two(tiny: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_disks.py")
    done = finished([*launcher(2), str(script), str(tiny), str(tmp_path)], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
