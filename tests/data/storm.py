"""Troubles of a server at random moments, drawn from a seed."""

import random
import time
from collections import Counter

STATUSES = ("500", "503")


class Storm:
    """Troubles of requests, drawn from a seed.

    Of a reset and a truncated write the server behind sees nothing; after a lost answer it has done
    what it was asked.

    Args:
        seed: of the draws.
        rates: how often a request meets each trouble.
        delay: seconds that an answer is late, at most.
        silence: seconds after which the connection of a silent server ends.
    """

    def __init__(
        self, seed: int, rates: dict[str, float], delay: float = 1.0, silence: float = 25.0
    ) -> None:
        self.delay = delay
        self.silence = silence
        self.met: Counter[str] = Counter()
        self._kinds = [*rates, ""]
        self._weights = [*rates.values(), 1 - sum(rates.values())]
        self._draws = random.Random(seed)
        self._outage = (0.0, "")

    def outage(self, seconds: float, trouble: str) -> None:
        """Let every request meet this trouble for a while."""
        self._outage = (time.monotonic() + seconds, trouble)

    def is_out(self) -> bool:
        """Tell whether an outage is on."""
        return time.monotonic() < self._outage[0]

    def draw(self) -> str:
        """Return the trouble of a request, empty for none."""
        trouble = self._draws.choices(self._kinds, self._weights)[0]
        if self.is_out():
            trouble = self._outage[1]
        if trouble:
            self.met[trouble] += 1
        return trouble

    def late(self) -> float:
        """Return how late an answer is, in seconds."""
        return self._draws.uniform(0, self.delay)
