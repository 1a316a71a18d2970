"""Imported by the fork server alone: all that training imports, in a process of one thread."""

import os

import pospre.certificate.life
import pospre.certificate.observer
import pospre.training.run  # noqa: F401

_threads = len(os.listdir("/proc/self/task"))
if _threads > 1:
    # A fork has the thread that forks only: what others had locked would stay locked for good.
    raise RuntimeError(
        f"the imports of training have started {_threads - 1} threads: no fork is safe"
    )
