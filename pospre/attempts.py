"""Trying again what may work later."""

import itertools
import random
import time
from collections.abc import Callable, Iterator

_CHANCE = random.SystemRandom()  # without a state, which checkpoints would hold


def attempts(
    until: Callable[[], float],
    first: float,
    longest: float,
    sleep: Callable[[float], object] | None = None,
) -> Iterator[int]:
    """Yield 1, 2, …, one number per attempt; the caller leaves the loop when one works.

    The pause after the first attempt is ``first`` seconds, each further one twice as long, up to
    ``longest``. It is shortened by up to a half at random: ranks that failed together do not try
    again together. The loop ends if the next attempt would begin after ``until()``, a time of
    ``time.monotonic``. ``sleep`` waits; by default ``time.sleep``.
    """
    for number in itertools.count():
        yield number + 1
        pause = min(first * 2.0 ** min(number, 30), longest) * _CHANCE.uniform(0.5, 1)
        if time.monotonic() + pause > until():
            return
        (sleep or time.sleep)(pause)
