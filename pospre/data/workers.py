"""The loader's threads, and the batches that they fill."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pospre.batch import Batch
from pospre.data.cores import available_cores


@dataclass
class PendingBatch:
    """A batch whose views are being written by the threads."""

    batch: Batch
    tasks: list[Future[None]]

    def result(self) -> Batch:
        """Wait for the threads; what one raised is raised here."""
        for task in self.tasks:
            task.result()
        return self.batch


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """Give a pool of threads, or None; it ends after an early break, an error or Ctrl-C too."""
    if count == 0:
        yield None
        return
    # Else torch would start threads of its own for each of ours, to copy a part of an image.
    pool = ThreadPoolExecutor(
        count, "pospre-loader", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """Return the cores that this process may use, shared among the ranks of this machine."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, available_cores() // num_ranks)
