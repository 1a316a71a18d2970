"""Where the loader's time goes: seconds per stage, summed over its threads.

``plan`` draws places and lays batches out; ``read`` waits for bytes and compares checksums;
``decode`` makes pixels of them; ``resize`` crops and resizes the views; ``wait`` is how long the
consumer waited for batches. All but ``wait`` are the time of the threads that work.
"""

import threading
import time

STAGES = ("plan", "read", "decode", "resize", "wait")


class Times:
    """Where time went.

    Attributes:
        seconds: by stage.
        num_images: samples that were cut.
        num_bytes: encoded bytes that were read.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.num_images = 0
        self.num_bytes = 0


class Stopwatch(Times):
    """One thread's stop-watch: each lap is the time since the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap on ``stage``."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


class LoaderTiming(Times):
    """Adds up what several threads have measured; ``seconds`` is a new dict each time."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, watch: Stopwatch) -> None:
        """Add what a thread measured."""
        with self._lock:
            self.seconds = {stage: self.seconds[stage] + watch.seconds[stage] for stage in STAGES}
            self.num_images += watch.num_images
            self.num_bytes += watch.num_bytes
