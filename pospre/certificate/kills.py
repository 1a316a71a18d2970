"""When a life ends: moments drawn from a seed, and bringing them about."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pospre.certificate.lives import Life
from pospre.training.checkpoints.finding import incomplete

KINDS = ("step", "save", "start", "SIGTERM")
_LOOK = 0.0005  # seconds between two looks for the moment
_MISSED = 4  # steps after which a save must have gone by unseen


class Kill(NamedTuple):
    """A moment at which a life ends.

    Attributes:
        kind: ``step``: SIGKILL in the middle of a step; ``save``: while a checkpoint is written;
            ``start``: before the first step; ``SIGTERM``: told to stop, so that it saves first.
        step: which must have begun.
        delay: share of the time that a step, or the start, takes.
    """

    kind: str
    step: int
    delay: float


@dataclass
class Pace:
    """How long things took undisturbed, in seconds.

    Attributes:
        start: from the beginning of a life to its first step.
        step: one step.
    """

    start: float
    step: float


def draw_kills(name: str, count: int, steps: int, seed: int) -> list[Kill]:
    """Return ``count`` moments in the order in which they come; all kinds, as far as they go.

    Args:
        name: of the run that is killed: each gets its own.
        count: of the moments.
        steps: of the whole run.
        seed: of the draws.
    """
    draws = random.Random(f"{seed}/{name}")
    kinds = [KINDS[place % len(KINDS)] for place in range(count)]
    draws.shuffle(kinds)
    moments = sorted(draws.randint(1, max(1, steps - 2)) for _ in kinds)
    return [Kill(kind, step, draws.random()) for kind, step in zip(kinds, moments, strict=True)]


def send_when_due(life: Life, is_due: Callable[[], bool], number: int = signal.SIGKILL) -> bool:
    """Send a life a signal as soon as it is due and wait for its end; tell whether that was so.

    Args:
        life: that has just been started.
        is_due: asked all the time; sees how far the life has come.
        number: of the signal.

    Returns:
        False where it came to an end by itself before.
    """
    while life.is_alive():
        life.look()
        if is_due():
            life.end(number)
            life.wait()
            life.look()
            return True
        time.sleep(_LOOK)
    return False


def is_due(kill: Kill, life: Life, pace: Pace, folder: Path) -> bool:
    """Tell whether the moment of a kill has come.

    Args:
        kill: the moment.
        life: that it ends.
        pace: what the delay is a share of.
        folder: of the local checkpoints, where a save shows.
    """
    if kill.kind == "start":
        return life.age() >= kill.delay * pace.start
    if life.begun < kill.step:
        return False
    if kill.kind == "save":
        return bool(incomplete(folder)) or life.begun > kill.step + _MISSED
    return life.since_begun() >= kill.delay * pace.step


def describe(kill: Kill, life: Life, folder: Path) -> str:
    """Say at which moment a kill has struck; it may have missed the one that it was meant for."""
    if kill.kind == "SIGTERM":
        return "by SIGTERM"
    if not life.begun:  # what is half written is of the life before
        return "before a step"
    return "in a save" if incomplete(folder) else "in a step"
