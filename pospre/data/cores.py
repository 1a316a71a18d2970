"""The number of available CPU cores, and thread pools."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


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
