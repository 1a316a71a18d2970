import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import convert
from data_prep.staging import remove_stale_partials
from pospre.errors import UserError, run_command
from tests.data_prep.reading import FORMATS, destination, read_samples
from tests.data_prep.sample_images import encoded, picture, write_files

ROOT = Path(__file__).parents[2]
NUM_IMAGES = 80


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@needs_proc
@pytest.mark.parametrize("data_format", FORMATS)
def test_a_killed_conversion_leaves_nothing_and_runs_again(
    tmp_path: Path, data_format: str
) -> None:
    target = destination(tmp_path, data_format)
    data = encoded(picture(0, 700, 700), "PNG")  # slow enough to be killed half-way
    source = write_files(tmp_path / "photos", {f"{n}.png": data for n in range(NUM_IMAGES)})
    arguments = [str(source), str(target), "--format", data_format, "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "data_prep.convert", *arguments], cwd=ROOT)
    try:
        wait_for(lambda: list(tmp_path.glob("out*.partial-*")) and len(children(process.pid)) >= 2)
        workers = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not target.exists()
    (partial,) = tmp_path.glob("out*.partial-*")
    assert partial.name.endswith(f"-{process.pid}")
    assert not (partial / "pospre.json").exists()
    wait_for(lambda: not any(is_running(pid) for pid in workers), seconds=20)
    assert run_command(lambda: convert.main(arguments)) == 0
    assert not list(tmp_path.glob("*.partial-*"))
    assert len(read_samples(target)) == NUM_IMAGES


@needs_proc
def test_ctrl_c_cleans_up(tmp_path: Path) -> None:
    data = encoded(picture(0, 700, 700), "PNG")
    source = write_files(tmp_path / "photos", {f"{n}.png": data for n in range(NUM_IMAGES)})
    command = [sys.executable, "-m", "data_prep.convert", str(source), str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "--format", "mds", "--workers", "2"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background job ignores Ctrl-C, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(lambda: list(tmp_path.glob("out.partial-*")) and len(children(process.pid)) >= 2)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "Traceback" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_living_writer_is_respected(tmp_path: Path) -> None:
    other = tmp_path / f"out.partial-{os.getppid()}"
    other.mkdir()
    with pytest.raises(UserError, match="is writing"):
        remove_stale_partials(tmp_path / "out")
    assert other.exists()


def test_only_partials_of_this_destination_are_removed(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the largest process number of Linux
    for name in (f"out.partial-{dead}", f"out.partial-{dead}-old", f"output.partial-{dead}", "out"):
        (tmp_path / name).mkdir()
    remove_stale_partials(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", f"output.partial-{dead}"]


def test_a_dead_worker_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from data_prep.parallel import ordered_map

    with pytest.raises(UserError, match="worker process died"):
        list(ordered_map(os._exit, [3, 3, 3], 2))


def test_ordered_map_keeps_the_order() -> None:
    from data_prep.parallel import ordered_map

    assert list(ordered_map(abs, range(-100, 0), 3)) == list(range(100, 0, -1))
