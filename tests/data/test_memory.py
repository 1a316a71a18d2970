"""What loading takes: told before the start, about right, and the same after twenty epochs."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from pospre.data.loader import ViewLoader, build_loader
from pospre.data.memory import (
    BYTES_OF_CODE,
    MemoryEstimate,
    available_memory,
    estimate_memory,
    stored_bytes,
)
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from tests.processes import finished

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {8 * GIB >> 10} kB"}
NEW = "sys/fs/cgroup"
OLD = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/", f"{NEW}/memory.max": "max"}, 8),
        (
            {
                "proc/self/cgroup": "0::/",
                f"{NEW}/memory.max": str(4 * GIB),
                f"{NEW}/memory.current": str(3 * GIB),
                f"{NEW}/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {GIB // 2}",
            },
            2.5,
        ),
        (  # a limit of a group around ours
            {
                "proc/self/cgroup": "0::/batch/job",
                f"{NEW}/batch/job/memory.max": "max",
                f"{NEW}/batch/job/memory.current": "5",
                f"{NEW}/batch/memory.max": str(2 * GIB),
                f"{NEW}/batch/memory.current": str(GIB),
            },
            1,
        ),
        (  # in a container, under the path that the group has outside
            {
                "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc",
                f"{OLD}/memory.limit_in_bytes": str(3 * GIB),
                f"{OLD}/memory.usage_in_bytes": str(2 * GIB),
                f"{OLD}/memory.stat": f"active_file 7\ntotal_active_file {GIB}",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/",
                f"{OLD}/memory.limit_in_bytes": str((1 << 63) - 4096),
                f"{OLD}/memory.usage_in_bytes": "5",
            },
            8,
        ),
        (  # more is used than allowed, as a limit may be lowered
            {
                "proc/self/cgroup": "0::/",
                f"{NEW}/memory.max": str(GIB),
                f"{NEW}/memory.current": str(2 * GIB),
            },
            0,
        ),
    ],
)
def test_what_a_machine_or_its_container_can_give(tmp_path, files, expected):
    assert available_memory(write(tmp_path, MACHINE | files)) == expected * GIB


def test_a_machine_that_does_not_say(tmp_path):
    assert available_memory(tmp_path) is None


def test_this_machine():
    available = available_memory()
    assert available is None or 1 << 20 < available < 1 << 50


def estimate(**changes: int | None) -> MemoryEstimate:
    sizes: dict[str, int | None] = {
        "batches": GIB,
        "decoding": GIB // 2,
        "tables": 0,
        "num_ranks": 2,
        "stored": 4 * GIB,
        "available": 10 * GIB,
    }
    return MemoryEstimate(**{**sizes, **changes})  # type: ignore[arg-type]


def test_data_that_fit_are_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate().check()
        estimate(stored=None).check()
        estimate(available=None).check()


def test_data_that_do_not_fit():
    with pytest.warns(UserWarning, match=r"about 8 GiB, but only 7 GiB .*every epoch will read"):
        estimate(stored=8 * GIB).check()


def test_buffers_that_do_not_fit():
    with pytest.raises(UserError, match=r"about 3 GiB .*GiB: batches 1 GiB, .*but 2 G") as caught:
        estimate(available=2 * GIB).check()
    assert "data.batch_size or data.num_workers" in str(caught.value)


def test_the_data_sets_size(data_set):
    reader = open_reader(data_set)
    files = [data_set] if data_set.is_file() else [f for f in data_set.rglob("*") if f.is_file()]
    assert stored_bytes(reader) == pytest.approx(sum(f.stat().st_size for f in files), rel=0.02)


def test_a_vanished_file_is_no_matter_of_the_estimate(image_folder):
    folder = image_folder(num_images=4)
    reader = open_reader(folder)
    Path(reader.name(0)).unlink()
    assert stored_bytes(reader) is None


def test_an_estimate_follows_the_loader(monkeypatch, photos):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def loader(batch_size: int, num_workers: int) -> ViewLoader:
        views = [ViewGroup(size=32, count=2), ViewGroup(name="small", size=16, count=3)]
        return build_loader(
            photos, views=views, batch_size=batch_size, seed=0, num_workers=num_workers
        )

    one, two = estimate_memory(loader(4, 0)), estimate_memory(loader(8, 0))
    assert one.num_ranks == 4 and one.total == 4 * one.per_rank
    pixels = 3 * (2 * 32 * 32 + 3 * 16 * 16)
    assert pixels * 4 * 2 <= one.batches <= 1.2 * pixels * 4 * 2
    assert two.batches == 2 * one.batches
    per_thread = one.decoding - BYTES_OF_CODE
    assert estimate_memory(loader(4, 3)).decoding == 3 * per_thread + BYTES_OF_CODE


def test_the_largest_image_is_known_of_converted_data(stored):
    """The largest of the photographs has 118 x 103 pixels; those of a folder are unknown."""

    def load(data_format: str) -> MemoryEstimate:
        path, views = stored(data_format), [ViewGroup(size=32)]
        return estimate_memory(build_loader(path, views=views, batch_size=4, seed=0, num_workers=1))

    folder, mds, beton = map(load, ("folder", "mds", "ffcv"))
    assert mds.decoding == beton.decoding
    assert folder.decoding - mds.decoding == 8 * (4_000_000 - 118 * 103)


MEASURE = """
import json, re, sys, time
from pathlib import Path
from pospre.data.loader import ViewLoader
from pospre.data.memory import BYTES_OF_CODE, estimate_memory
from pospre.data.stores.ffcv import FfcvReader
from pospre.data.views.options import ViewGroup

def status(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\\s+(\\d+)", text).group(1)) << 10

reader = FfcvReader(Path(sys.argv[1]))
small = ViewLoader(reader, views=[ViewGroup(size=96, count=3)], batch_size=4, seed=0, num_workers=2)
resident = []
for small.epoch in range(20):
    for batch in small:
        pass
    resident.append(status("VmRSS"))
large = ViewLoader(
    reader, views=[ViewGroup(size=1000, crop="full", interpolation="bilinear")],
    batch_size=4, seed=0, num_workers=1,
)
Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
start = status("VmRSS")
for batch in large:
    time.sleep(0.1)
grown = status("VmHWM") - start
expected = estimate_memory(large).per_rank - BYTES_OF_CODE  # it is there already
print(json.dumps([resident, grown, expected]))
"""


@pytest.fixture(scope="module")
def measured(stored: Callable[[str], Path]) -> tuple[list[int], int, int]:
    """Resident bytes after each epoch; then the growth by another loader, and its estimate."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux")
    command = [sys.executable, "-c", MEASURE, str(stored("ffcv"))]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    resident, grown, expected = json.loads(done.stdout)
    return resident, grown, expected


def test_twenty_epochs_take_no_more_memory_than_three(measured):
    resident, _, _ = measured
    assert max(resident[-3:]) - resident[2] < 8 << 20  # an epoch's views are 2 MB


def test_the_estimate_is_about_what_is_taken(measured):
    _, grown, expected = measured
    assert 0.5 * expected < grown < 1.1 * expected
