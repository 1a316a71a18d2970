"""How many CPU cores there are to work with."""

import os


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer in containers and batch jobs
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
