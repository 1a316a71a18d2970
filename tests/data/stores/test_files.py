"""Samples of local files: the right bytes whatever is expected, few open files, cut files named."""

import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pospre.data.stores.files import ByteRange, SampleBytes
from tests.refusals import refuses

NUM_SAMPLES = 60
SIZES = np.random.default_rng(0).integers(1, 9000, NUM_SAMPLES)
ENDS = np.cumsum(SIZES)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(np.random.default_rng(1).bytes(int(ENDS[-1])))
    return path


@pytest.fixture
def place(file: Path) -> Callable[[int], ByteRange]:
    return lambda index: ByteRange(file, int(ENDS[index] - SIZES[index]), int(SIZES[index]))


def expected(file: Path, index: int) -> bytes:
    return file.read_bytes()[ENDS[index] - SIZES[index] : ENDS[index]]


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    order=st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=100),
    reads=st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=30),
    can_hint=st.booleans(),
)
def test_any_expectation_gives_the_same_bytes(file, place, order, reads, can_hint):
    with pytest.MonkeyPatch.context() as patch:
        if not can_hint:
            patch.delattr(os, "posix_fadvise")  # macOS
        store = SampleBytes(place)
        store.expect(np.array(order, np.int64))
        for index in [*order, *reads]:
            assert store.read(index).numpy().tobytes() == expected(file, index)
        store.close()


def test_a_file_that_is_cut_off_or_gone_is_named_when_it_is_needed(tmp_path, file, place):
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes()[: ENDS[30]])
    store = SampleBytes(lambda index: ByteRange(copy, *place(index)[1:]))
    store.expect(np.arange(NUM_SAMPLES))
    assert store.read(5).numpy().tobytes() == expected(file, 5)
    refuses(r"copy is truncated", lambda: store.read(40))
    store.close()
    copy.unlink()
    store.expect(np.arange(NUM_SAMPLES))
    refuses(r"copy cannot be read: No such file", lambda: store.read(5))


def test_the_kernel_is_told_what_comes(monkeypatch, place):
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *part: advised.append(part[:2]))
    store = SampleBytes(place)
    order = np.tile(np.random.default_rng(5).permutation(NUM_SAMPLES), 9)
    store.expect(order)
    assert advised == [place(index)[1:] for index in order[:256].tolist()]
    for index in order.tolist():
        store.read(index)
    assert advised == [place(index)[1:] for index in order.tolist()]


def test_open_files_are_few_and_never_taken_for_others(tmp_path, monkeypatch):
    opened: list[FileIO] = []

    def open_file(path: Path) -> FileIO:
        opened.append(FileIO(path))
        return opened[-1]

    monkeypatch.setattr("pospre.data.stores.files.FileIO", open_file)
    paths = [tmp_path / f"{number}" for number in range(100)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    store = SampleBytes(lambda index: ByteRange(paths[index], 2, 5))
    for _ in range(2):
        for number in range(100):
            assert store.read(number).tolist() == [number] * 5
            assert store.read(number).tolist() == [number] * 5
    assert len(opened) == 200, "a file that is read again at once is not opened again"
    assert os.read(opened[0].fileno(), 3) == bytes(3)  # forgotten meanwhile, but still in use
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    opened.clear()
    if descriptors:
        assert descriptors - len(os.listdir("/proc/self/fd")) == 200 - 64
    store.close()
    if descriptors:
        assert descriptors - len(os.listdir("/proc/self/fd")) == 200
