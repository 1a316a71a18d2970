import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from data_prep.distribute.ordered_maps import ordered_map
from tests.data_prep.reading import Says, call, run
from tests.data_prep.sample_images import encoded, picture, write_files
from tests.disk import snapshot
from tests.processes import LIMIT, started, until
from tests.refusals import refuses

ROOT = Path(__file__).parents[3]
NUM_IMAGES, NUM_BLOCKS = 48, 24


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that take long enough to be killed half-way."""
    data = encoded(picture(0, 700, 700), "PNG")
    files = {f"{number}.png": data for number in range(NUM_IMAGES)}
    return write_files(tmp_path_factory.mktemp("slow") / "photos", files)


def command(source: Path, target: Path, num_blocks: int = NUM_BLOCKS) -> list[str]:
    shard_mb = NUM_IMAGES / num_blocks * (source / "0.png").stat().st_size / 1e6
    options = ["--format", "mds", "--workers", "2", "--shard-mb", str(shard_mb)]
    return [str(source), str(target), *options]


def python(script: str, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return started([sys.executable, "-c", script, *arguments], cwd=ROOT)


# a shell's background job ignores Ctrl-C, and so would its children
CONVERT = """
import signal, sys
from data_prep.convert import main
from pospre.errors import run_command
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run_command(main))
"""


def test_a_killed_conversion_goes_on(tmp_path: Path, slow_source: Path, printed: Says) -> None:
    whole = tmp_path / "whole" / "out"
    assert call(*command(slow_source, whole)) == 0
    target = tmp_path / "killed" / "out"
    arguments = command(slow_source, target)
    partial = target.with_name(target.name + ".partial")
    with python(CONVERT, *arguments) as process:
        until(lambda: len(list(partial.glob("*.*.json"))) >= 3, LIMIT)
        workers = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not target.exists() and len(workers) >= 2
        until(lambda: not any(map(is_running, workers)))
    times = {path: path.stat().st_mtime_ns for path in partial.glob("data/*")}
    kept = len(list(partial.glob("*.*.json")))
    assert 3 <= kept < NUM_BLOCKS
    said = f"{kept} of {NUM_BLOCKS} blocks were already finished"
    assert said in printed(call, *arguments)
    assert snapshot(target.parent) == snapshot(whole.parent)
    # they are not written again
    again = [path for path in times if (target / path.name).stat().st_mtime_ns != times[path]]
    assert len(again) <= len(times) - kept


def test_ctrl_c_cleans_up(tmp_path: Path, slow_source: Path) -> None:
    with python(CONVERT, *command(slow_source, tmp_path / "out", num_blocks=1)) as process:
        until(lambda: list(tmp_path.glob("out.partial/block-*")), LIMIT)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())


def test_a_living_writer_is_respected(tmp_path: Path, photos: Path, refused: Says) -> None:
    script = (
        "import signal, sys; from pathlib import Path;"
        "from data_prep.publish.local import LocalShards\n"
        "with LocalShards(Path(sys.argv[1])).locked(shared=False): print('held', flush=True); "
        "signal.pause()"
    )
    target = tmp_path / "out"
    with python(script, str(target)) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        said = refused(run, photos, target)
        assert re.search(rf"process {other.pid} on .* is writing .*out", said)
    assert run(photos, target) == 0  # the other was killed
    assert not (tmp_path / "out.partial").exists()


def test_a_dead_worker_is_reported() -> None:
    refuses("worker process died", lambda: list(ordered_map(os._exit, [3, 3, 3], 2)))


def test_ordered_map_keeps_the_order() -> None:
    assert list(ordered_map(abs, range(-100, 0), 3)) == list(range(100, 0, -1))
