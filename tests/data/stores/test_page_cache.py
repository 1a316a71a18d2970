"""Reading ahead: the same bytes, less waiting, bounded memory, no thread left."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pospre.data.stores.files import OpenFiles, read_bytes
from pospre.data.stores.opening import open_reader
from pospre.data.stores.page_cache import (
    PAGE_CACHES,
    Place,
    ReadAhead,
    SampleBytes,
    SystemCache,
    sample_bytes,
)
from pospre.errors import UserError

NUM_SAMPLES = 60
SIZES = np.random.default_rng(0).integers(1, 9000, NUM_SAMPLES)
ENDS = np.cumsum(SIZES)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(np.random.default_rng(1).bytes(int(ENDS[-1])))
    return path


@pytest.fixture
def place(file: Path) -> Callable[[int], Place]:
    return lambda index: Place(file, int(ENDS[index] - SIZES[index]), int(SIZES[index]))


def expected(file: Path, index: int) -> bytes:
    return file.read_bytes()[ENDS[index] - SIZES[index] : ENDS[index]]


def read_ahead_threads() -> int:
    return sum("pospre-read-ahead" in thread.name for thread in threading.enumerate())


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[int, float]]:
    """Let every read take its time, as over a network; return a list of (bytes, seconds)."""
    calls: list[tuple[int, float]] = []
    preadv = os.preadv

    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        start = time.perf_counter()
        time.sleep(seconds)
        count = preadv(descriptor, buffers, offset)
        calls.append((count, time.perf_counter() - start))
        return count

    monkeypatch.setattr(os, "preadv", slow)
    return calls


@pytest.mark.parametrize("mode", PAGE_CACHES)
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    order=st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=100),
    reads=st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=30),
    repeats=st.integers(1, 3),
)
def test_any_expectation_gives_the_same_bytes(file, place, mode, order, reads, repeats):
    store = sample_bytes(mode, place)
    store.expect(np.repeat(np.array(order, np.int64), repeats))
    for index in [*order, *reads]:
        assert store.read(index).numpy().tobytes() == expected(file, index)
    store.close()


def test_reading_ahead_hides_slow_reads(monkeypatch, file, place):
    calls = slow_reads(monkeypatch, 0.02)
    store = ReadAhead(place, num_threads=8)
    order = np.random.default_rng(2).permutation(NUM_SAMPLES)
    store.expect(order)
    start = time.perf_counter()
    found = [store.read(index).numpy().tobytes() for index in order.tolist()]
    elapsed = time.perf_counter() - start
    assert found == [expected(file, index) for index in order]
    assert elapsed < 0.5 * sum(seconds for _, seconds in calls)  # which a busy machine lengthens
    assert sum(count for count, _ in calls) == ENDS[-1], "a sample was read twice"
    store.close()


def test_repeats_in_a_row_are_read_once(monkeypatch, place):
    calls = slow_reads(monkeypatch, 0.001)
    store = ReadAhead(place)
    order = np.repeat(np.arange(0, NUM_SAMPLES, 2), 3)
    store.expect(order)
    with ThreadPoolExecutor(4) as readers:
        list(readers.map(store.read, order.tolist()))
    assert sum(count for count, _ in calls) <= SIZES[::2].sum() + 4 * 3 * SIZES.max()
    store.close()


def test_neighbours_are_read_at_once(monkeypatch, place):
    calls = slow_reads(monkeypatch, 0)
    store = ReadAhead(place)
    store.expect(np.arange(NUM_SAMPLES))
    for index in range(NUM_SAMPLES):
        store.read(index)
    store.close()
    assert len(calls) == 1


@pytest.mark.parametrize("order", ["in order", "backwards", "something else"])
def test_memory_is_bounded_whatever_is_read(monkeypatch, place, order):
    limit = 40_000
    calls = slow_reads(monkeypatch, 0)
    store = ReadAhead(place, num_bytes=limit, num_threads=4)
    expectation = np.random.default_rng(3).permutation(NUM_SAMPLES)
    reads = {
        "in order": expectation,
        "backwards": expectation[::-1],
        "something else": np.random.default_rng(4).permutation(NUM_SAMPLES),
    }[order]
    store.expect(expectation)
    for number, index in enumerate(reads.tolist()):
        time.sleep(0.001)  # time for the threads to go too far
        ahead = sum(count for count, _ in calls) - SIZES[reads[:number]].sum()
        assert ahead <= limit
        store.read(index)
    store.close()


def test_samples_larger_than_the_memory_are_read_directly(file, place):
    store = ReadAhead(place, num_bytes=int(np.median(SIZES)))
    store.expect(np.arange(NUM_SAMPLES))
    for index in range(NUM_SAMPLES):
        assert store.read(index).numpy().tobytes() == expected(file, index)
    store.close()


def test_close_ends_the_threads_promptly(monkeypatch, place):
    calls = slow_reads(monkeypatch, 0.05)
    store = ReadAhead(place, num_threads=4)
    store.expect(np.arange(0, NUM_SAMPLES, 2))
    assert read_ahead_threads() == 4
    done = len(calls)
    store.close()
    assert len(calls) <= done + 8  # of 30: what each thread was reading, and perhaps had just begun
    assert read_ahead_threads() == 0
    store.close()
    store.expect(np.arange(3))
    assert store.read(2) is not None
    store.close()


def test_who_waits_when_it_is_closed_reads_directly(monkeypatch, file, place):
    slow_reads(monkeypatch, 0.05)
    store = ReadAhead(place, num_threads=1)
    order = np.arange(0, NUM_SAMPLES, 2)
    store.expect(order)
    with ThreadPoolExecutor(1) as consumer:
        waiting = consumer.submit(store.read, int(order[20]))
        time.sleep(0.02)
        store.close()
        assert waiting.result(5).numpy().tobytes() == expected(file, int(order[20]))


@pytest.mark.parametrize("mode", PAGE_CACHES)
def test_a_file_that_is_cut_off_or_gone_is_named_when_it_is_needed(tmp_path, file, place, mode):
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes()[: ENDS[30]])
    store = sample_bytes(mode, lambda index: Place(copy, *place(index)[1:]))
    store.expect(np.arange(NUM_SAMPLES))
    assert store.read(5).numpy().tobytes() == expected(file, 5)
    with pytest.raises(UserError, match=r"copy is cut off"):
        store.read(40)
    store.close()
    copy.unlink()
    store.expect(np.arange(NUM_SAMPLES))
    with pytest.raises(UserError, match=r"copy cannot be read"):
        store.read(5)
    store.close()


def test_the_kernel_is_told_what_comes(monkeypatch, place):
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *part: advised.append(part[:2]))
    store: SampleBytes = SystemCache(place)
    order = np.tile(np.random.default_rng(5).permutation(NUM_SAMPLES), 9)
    store.expect(order)
    assert advised == [place(index)[1:] for index in order[:256].tolist()]
    for index in order.tolist():
        store.read(index)
    assert advised == [place(index)[1:] for index in order.tolist()]


def test_no_way_to_advise(monkeypatch, file, place):
    monkeypatch.delattr(os, "posix_fadvise")  # macOS
    for mode in PAGE_CACHES:
        store = sample_bytes(mode, place)
        store.expect(np.arange(5))
        assert [store.read(i).numpy().tobytes() for i in range(5)] == [
            expected(file, i) for i in range(5)
        ]
        store.close()


def test_an_unknown_page_cache(place):
    with pytest.raises(UserError, match=r"page_cache 'proces' is unknown\. Did you mean 'process'"):
        sample_bytes("proces", place)


def test_image_folders_are_left_to_the_kernel(photos):
    assert open_reader(photos, page_cache="os").format == "folder"
    with pytest.raises(UserError, match=r"page_cache is 'process', but .* image folder.*make data"):
        open_reader(photos, page_cache="process")


def test_open_files_are_few_and_never_taken_for_others(tmp_path):
    files, paths = OpenFiles(), [tmp_path / f"{number}" for number in range(100)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    first = files.get(paths[0])
    assert files.get(paths[0]) is first
    for _ in range(2):
        for number, path in enumerate(paths):
            assert read_bytes(path, 2, 5, files=files).tolist() == [number] * 5
    assert os.read(first.fileno(), 3) == bytes(3)  # forgotten meanwhile, but somebody has it
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    files.forget()
    if descriptors:
        assert descriptors - len(os.listdir("/proc/self/fd")) == 64
    paths[5].unlink()
    with pytest.raises(UserError, match=r"5 cannot be read: No such file"):
        read_bytes(paths[5], 0, 1, files=files)
