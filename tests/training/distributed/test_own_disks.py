"""Two nodes that share nothing but a bucket."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import boto3
import psutil
import pytest

from tests.data.flaky_s3 import moto_server, use_bucket
from tests.processes import LIMIT, launcher, started
from tests.training.distributed.test_rendezvous import free_port
from tests.training.tiny_runs import LONG, environment, wait_for_step


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the address of a folder in a bucket."""
    with moto_server() as port:
        use_bucket(monkeypatch, f"http://127.0.0.1:{port}")
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket")
        yield "s3://bucket/run"


def nodes(recipe: Path, disks: Path, *overrides: str) -> list[list[str]]:
    """Return the commands of two nodes of one rank, each with a disk of its own."""
    port = str(free_port())
    place = ["--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", port]
    program = ["-m", "pospre.train", str(recipe), *overrides]
    return [
        [*launcher(1), *place, "--node_rank", node, *program, f"trainer.run_folder={disks / node}"]
        for node in ("0", "1")
    ]


def test_a_node_that_is_told_to_stop(tiny: Path, bucket: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        commands = nodes(tiny, tmp_path, *LONG, f"trainer.save_folder={bucket}")
        first, second = [
            stack.enter_context(started(command, env=environment())) for command in commands
        ]
        wait_for_step(4, tmp_path / "0" / "tiny", first)
        for rank in psutil.Process(second.pid).children():
            rank.send_signal(signal.SIGTERM)
        said = [node.communicate(timeout=LIMIT) for node in (first, second)]
    assert [first.returncode, second.returncode] == [75, 75], said
    assert "stopped by SIGTERM after step" in said[0][1] and "Traceback" not in str(said)
