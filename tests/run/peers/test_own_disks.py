"""Two nodes that share nothing but a bucket."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.data.flaky_s3 import FlakyS3
from tests.processes import LIMIT, free_port, launcher, started, until
from tests.training.tiny_runs import LONG, environment, wait_for_step


def nodes(recipe: Path, disks: Path, *overrides: str) -> list[list[str]]:
    """Return the commands of two nodes of one rank, each with a disk of its own."""
    port = str(free_port())
    place = ["--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    program = ["-m", "pospre.train", str(recipe), *overrides]
    return [
        [*launcher(1), *place, "--node_rank", node, *program, f"trainer.run_folder={disks / node}"]
        for node in ("0", "1")
    ]


def test_a_node_that_is_told_to_stop(
    tiny: Path, bucket: Any, proxy: FlakyS3, tmp_path: Path
) -> None:
    options = (*LONG, "trainer.save_folder=s3://bucket/run", "trainer.save_interval=99ep")
    with ExitStack() as stack:
        first, second = [
            stack.enter_context(started(command, env=environment()))
            for command in nodes(tiny, tmp_path, *options)
        ]
        wait_for_step(4, tmp_path / "0" / "tiny", first)
        proxy.mute = "/run/ep"
        for rank in psutil.Process(second.pid).children():
            rank.send_signal(signal.SIGTERM)
        until(lambda: any("/run/ep" in place for place in proxy.writes), LIMIT)
        time.sleep(2)
        assert second.poll() is None  # a launcher would kill rank 0 soon after it
        proxy.mute = None
        said = [node.communicate(timeout=LIMIT) for node in (first, second)]
    assert [first.returncode, second.returncode] == [75, 75], said
    assert "stopped by SIGTERM after step" in said[0][1]
    assert "Traceback" not in str(said) and "is not in s3://" not in str(said)
