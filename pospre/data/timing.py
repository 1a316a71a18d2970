"""The loader's time per stage, in seconds, summed over its threads.

``plan`` draws boxes and allocates batches; ``read`` waits for bytes and verifies checksums;
``decode`` makes pixels; ``resize`` crops and resizes the views; ``wait`` is the consumer's time
waiting for batches. All except ``wait`` are times of the working threads.
"""

import threading
import time

STAGES = ("plan", "read", "decode", "resize", "wait")


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
