"""Conversion on a Dask cluster: the blocks of the same plan, converted elsewhere."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep.distribute import conversion, ordered_maps
from pospre.errors import Unreachable
from tests.data_prep.reading import Says, call
from tests.data_prep.sample_images import encoded, odd_files, picture, write_files
from tests.disk import snapshot

distributed = pytest.importorskip("distributed")

OPTIONS = ("--format", "mds", "--shard-mb", 0.02)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    more = {f"plain/{number}.jpg": encoded(picture(number)) for number in range(20)}
    return write_files(tmp_path / "source", odd_files() | more)


convert_block = conversion.convert_block


def convert_but_die_once(task: Any, job: Any) -> Any:
    """Runs in a worker, which imports this file."""
    mark = Path(os.environ["DIED_ONCE"])
    if task[0].number == 1 and not mark.exists():
        mark.touch()
        os._exit(1)
    return convert_block(task, job)


def test_the_same_bytes_as_without_a_cluster_although_a_worker_dies(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, printed: Says
) -> None:
    assert call(source, tmp_path / "whole", *OPTIONS) == 0
    monkeypatch.setenv("DIED_ONCE", str(tmp_path / "died"))
    monkeypatch.setattr(conversion, "convert_block", convert_but_die_once)
    target = tmp_path / "dask"
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None
    ) as processes:
        options = (*OPTIONS, "--scheduler", processes.scheduler_address)
        assert "images          35" in printed(call, source, target, *options)
    assert (tmp_path / "died").exists()
    assert snapshot(target) == snapshot(tmp_path / "whole")
    assert "already holds this conversion" in printed(call, source, target, *options)


@pytest.fixture(scope="module")
def scheduler() -> Any:
    """A cluster of threads of this process, so that patches hold."""
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as local,
        distributed.Client(local),
    ):
        yield local.scheduler_address


def test_a_block_that_fails_is_tried_again(
    tmp_path: Path, source: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = conversion.convert_block

    def fails_twice(task: Any, job: Any) -> Any:
        if task[0].number == 1 and len(list(tmp_path.glob("failure*"))) < 2:
            (tmp_path / f"failure{time.monotonic_ns()}").touch()  # Dask copies lists
            raise OSError("the network is away")
        return work(task, job)

    monkeypatch.setattr(conversion, "convert_block", fails_twice)
    assert call(source, tmp_path / "out", *OPTIONS, "--scheduler", scheduler) == 0
    assert len(list(tmp_path.glob("failure*"))) == 2
    assert (tmp_path / "out" / "index.json").exists()


def test_a_block_that_cannot_succeed_is_named_and_the_others_are_kept(
    tmp_path: Path, source: Path, scheduler: str, refused: Says, printed: Says
) -> None:
    (source / "plain" / "9.jpg").write_bytes(b"")
    options = (*OPTIONS, "--scheduler", scheduler)
    message = refused(call, source, tmp_path / "out", *options, "--strict")
    assert "a block failed 4 times" in message and "plain/9.jpg cannot be read" in message
    assert "are finished and kept in" in message
    assert "blocks were already finished" in printed(call, source, tmp_path / "out", *options)


def _away(_: int) -> None:
    raise Unreachable("the bucket does not answer")


def test_what_may_pass_is_still_said_to(scheduler: str) -> None:
    with pytest.raises(Unreachable, match=r"failed 4 times on the cluster: the bucket does not"):
        list(ordered_maps.cluster_map(_away, [1], scheduler))


def test_no_scheduler(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setattr(ordered_maps, "_CONNECT_SECONDS", 1)
    options = ("--format", "mds", "--scheduler", "tcp://127.0.0.1:9")
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in refused(
        call, source, tmp_path / "out", *options
    )


def test_without_dask(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "pip install dask distributed" in refused(
        call, source, tmp_path / "out", "--format", "mds", "--scheduler", "tcp://x:1"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
