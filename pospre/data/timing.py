"""Where the loader's time goes: seconds per stage, summed over its threads."""

import threading
import time
from collections.abc import Mapping

STAGES = ("plan", "read", "decode", "resize", "wait")


class Stopwatch:
    """One thread's stop-watch: each lap is the time since the one before.

    Attributes:
        seconds: by stage.
        num_images: samples that were cut.
        num_bytes: encoded bytes that were read.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.num_images = 0
        self.num_bytes = 0
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap on ``stage``."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


class LoaderTiming:
    """Adds up seconds per stage from several threads.

    ``plan`` draws places and lays batches out; ``read`` waits for bytes and compares checksums;
    ``decode`` makes pixels of them; ``resize`` crops and resizes the views; ``wait`` is how long
    the consumer waited for batches. All but ``wait`` are the time of the threads that work.

    Attributes:
        num_images: samples that were cut so far.
        num_bytes: encoded bytes that were read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self.num_images = 0
        self.num_bytes = 0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by stage so far."""
        with self._lock:
            return dict(self._seconds)

    def add(self, watch: Stopwatch) -> None:
        """Add what a thread measured."""
        with self._lock:
            for stage, seconds in watch.seconds.items():
                self._seconds[stage] += seconds
            self.num_images += watch.num_images
            self.num_bytes += watch.num_bytes
