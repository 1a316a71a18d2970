"""Workers that end with their command, and what full shared memory says."""

import errno
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from data_prep.distribute import ordered_maps
from data_prep.distribute.ordered_maps import ordered_map
from tests.processes import until
from tests.refusals import refuses


def test_a_second_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(multiprocessing.active_children())
    results = ordered_map(time.sleep, [0.0, 600.0, 600.0], 2)
    assert next(results) is None
    shutdown = ProcessPoolExecutor.shutdown

    def interrupted(self: ProcessPoolExecutor, **_: Any) -> None:
        shutdown(self, wait=False, cancel_futures=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.close()
    until(lambda: not set(multiprocessing.active_children()) - before)


@pytest.mark.parametrize("part", ["Activity", "ProcessPoolExecutor"])
def test_full_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ordered_maps, part, full)
    refuses(r"/dev/shm.*--workers 1", lambda: next(ordered_map(abs, [1, 2], 2)))
