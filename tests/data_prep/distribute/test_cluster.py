"""Conversion on a Dask cluster: the blocks of the same plan, converted elsewhere."""

import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from data_prep.distribute import cluster, conversion
from pospre.errors import Unreachable
from tests.data_prep.reading import call
from tests.data_prep.sample_images import encoded, odd_files, picture, write_files

if find_spec("distributed") is None:
    pytest.skip("Dask is not installed", allow_module_level=True)

OPTIONS = ("--format", "mds", "--shard-mb", 0.02)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    more = {f"plain/{number}.jpg": encoded(picture(number)) for number in range(20)}
    return write_files(tmp_path / "source", odd_files() | more)


def test_the_same_bytes_as_without_a_cluster(
    tmp_path: Path,
    source: Path,
    snapshot: Callable[[Path], dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(source, tmp_path / "whole", *OPTIONS) == 0
    capsys.readouterr()
    target, options = tmp_path / "dask", (*OPTIONS, "--workers", 2, "--scheduler", "local")
    assert call(source, target, *options) == 0
    assert "images          35" in capsys.readouterr().out
    assert snapshot(target) == snapshot(tmp_path / "whole")
    assert call(source, target, *options) == 0
    assert "already holds this conversion" in capsys.readouterr().out


@pytest.fixture
def scheduler() -> Any:
    """A cluster of threads of this process, so that patches hold."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as local,
        Client(local),
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


def _die_once(path: Path) -> str:
    if path.name == "1" and not path.exists():
        path.touch()
        os._exit(1)
    return path.name


def test_the_task_of_a_worker_that_dies_is_done_by_another(tmp_path: Path) -> None:
    names = [str(number) for number in range(4)]
    paths = [tmp_path / name for name in names]
    assert list(cluster.cluster_map(_die_once, paths, "local", 1)) == names
    assert (tmp_path / "1").exists()


def test_a_block_that_cannot_succeed_is_named_and_the_others_are_kept(
    tmp_path: Path, source: Path, scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "plain" / "9.jpg").write_bytes(b"")
    options = (*OPTIONS, "--scheduler", scheduler)
    assert call(source, tmp_path / "out", *options, "--strict") == 2
    message = capsys.readouterr().err
    assert "a block failed 4 times" in message and "plain/9.jpg cannot be read" in message
    assert "are finished and kept in" in message
    assert call(source, tmp_path / "out", *options) == 0
    assert "blocks were already finished" in capsys.readouterr().out


def _away(_: int) -> None:
    raise Unreachable("the bucket does not answer")


def test_what_may_pass_is_still_said_to(scheduler: str) -> None:
    with pytest.raises(Unreachable, match=r"failed 4 times on the cluster: the bucket does not"):
        list(cluster.cluster_map(_away, [1], scheduler, 1))


def test_no_scheduler(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_SECONDS", 1)
    options = ("--format", "mds", "--scheduler", "tcp://127.0.0.1:9")
    assert call(source, tmp_path / "out", *options) == 2
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in capsys.readouterr().err


def test_without_dask(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert call(source, tmp_path / "out", "--format", "mds", "--scheduler", "local") == 2
    assert "pip install dask distributed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
