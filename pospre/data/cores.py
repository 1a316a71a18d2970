"""How many CPU cores there are to work with, and how to work on one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in containers and batch jobs
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to this thread for a while, and its pool out of it."""
    import torch  # only here: commands that ask for the cores should not wait for it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
