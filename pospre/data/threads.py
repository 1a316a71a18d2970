"""The threads of a loader: available CPU cores, pools of threads, and their time per stage.

``plan`` draws boxes and allocates batches; ``read`` waits for bytes and verifies checksums;
``decode`` makes pixels; ``resize`` crops and resizes the views; ``wait`` is the consumer's time
waiting for batches. All except ``wait`` are times of the working threads, in seconds.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

STAGES = ("plan", "read", "decode", "resize", "wait")


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in containers and batch jobs
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Return the number of available cores per rank of this machine."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, available_cores() // num_ranks)


@contextmanager
def thread_pool(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """Yield a pool of threads, or None; it ends even after an early break, an error or Ctrl-C."""
    if count == 0:
        yield None
        return
    import torch  # late: commands that only count cores should not wait for it

    # otherwise torch would start its own threads for each of ours, to copy a part of an image
    pool = ThreadPoolExecutor(
        count, "pospre-loader", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to this thread for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LoaderTiming:
    """Seconds by stage, and the numbers of processed samples and of encoded bytes read."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.num_images = 0
        self.num_bytes = 0
        self._lock = threading.Lock()

    def add(self, watch: "Stopwatch") -> None:
        """Add a thread's times; ``seconds`` becomes a new dict."""
        with self._lock:
            self.seconds = {stage: self.seconds[stage] + watch.seconds[stage] for stage in STAGES}
            self.num_images += watch.num_images
            self.num_bytes += watch.num_bytes


class Stopwatch(LoaderTiming):
    """One thread's stopwatch: each lap is the time since the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to ``stage``."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now
