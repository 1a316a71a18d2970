import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep import convert, engine
from data_prep.distribute.blocks import Share
from pospre.errors import run_command
from tests.data_prep.sample_images import encoded, odd_files, picture, write_files

pytest.importorskip("distributed")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    more = {f"plain/{number}.jpg": encoded(picture(number)) for number in range(20)}
    return write_files(tmp_path / "source", odd_files() | more)


def call(*arguments: object) -> int:
    return run_command(lambda: engine.main([str(argument) for argument in arguments]))


def test_the_same_bytes_as_without_an_engine(
    tmp_path: Path,
    source: Path,
    snapshot: Callable[[Path], dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--format", "mds", "--shard-mb", "0.02")
    assert convert.main([str(source), str(tmp_path / "whole"), *options]) == 0
    target = tmp_path / "dask"
    assert call(source, target, *options, "--workers", 2, "--parts", 3) == 0
    assert "images          35" in capsys.readouterr().out
    assert snapshot(target) == snapshot(tmp_path / "whole")


def test_a_part_that_fails_is_tried_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client, LocalCluster

    work = engine._convert_part

    def fails_twice(task: tuple) -> bool:
        if task[3] == Share(2, 2) and len(list(tmp_path.glob("failure*"))) < 2:
            (tmp_path / f"failure{time.monotonic_ns()}").touch()  # Dask copies lists
            raise OSError("the network is away")
        return work(task)

    monkeypatch.setattr(engine, "_convert_part", fails_twice)
    options = ("--format", "mds", "--shard-mb", 0.02, "--parts", 2)
    # threads of this process, so that the patch holds
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster),
    ):
        address = cluster.scheduler_address
        assert call(source, tmp_path / "out", *options, "--scheduler", address) == 0
        assert len(list(tmp_path.glob("failure*"))) == 2
        assert (tmp_path / "out" / "index.json").exists()


def test_a_part_that_cannot_succeed_is_named(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "plain" / "3.jpg").write_bytes(b"")
    options = ("--format", "mds", "--strict", "--workers", 1)
    assert call(source, tmp_path / "out", *options) == 2
    message = capsys.readouterr().err
    assert "part 1/1 failed 4 times" in message and "plain/3.jpg cannot be read" in message


def test_no_scheduler(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine, "_PATIENCE", 1)
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
    assert call(source, tmp_path / "out", "--format", "mds") == 2
    assert "pip install dask distributed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
