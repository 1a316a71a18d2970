"""When to save under ``trainer.save_interval: auto``: from the cost of a save and of failures."""

import math
import statistics
from collections import deque
from time import monotonic

from composer.core import Event, State

from pospre.collectives import from_rank_zero

FIRST = 20
"""Steps before the first save; the second half of them is timed, because the first may compile."""
_REMEMBERED = 5  # saves; their median outlasts a stall of the disk
_SAID_AGAIN = 2.0  # factor between intervals


def best_interval(save: float, between: float) -> float:
    """Return the seconds between two saves that lose the least time to saves and failures.

    Saving every t seconds costs ``save`` / t of the time. A failure, each ``between`` seconds on
    average, loses t / 2. The sum is least at t = sqrt(2 · ``save`` · ``between``), if ``save`` is
    much shorter than ``between`` (Young, "A first order approximation to the optimum checkpoint
    interval", Communications of the ACM 17, 1974; Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006). The time
    to restart does not change it, nor does writing beside the steps, which delays every checkpoint
    equally.

    Args:
        save: seconds that training waits for a save.
        between: mean seconds between failures of the whole run.
    """
    return math.sqrt(2 * save * between)


class AutoInterval:
    """Plans each save from the measured cost of those before, on all ranks for the same step.

    The first save, after ``FIRST`` steps, measures. After each one rank 0 sends all ranks the
    number of steps to the next; between saves they exchange nothing. A resumed run measures again.

    Args:
        node_failures: mean seconds between failures of one node.
        nodes: number of nodes; one that fails ends the run.
    """

    def __init__(self, node_failures: float, nodes: int) -> None:
        self.between = node_failures / nodes
        self.next = 0
        self._nodes = nodes
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._timed, self._since = 0, 0.0  # the step after which timing began, and when
        self._began = 0.0
        self._said = 0.0

    def fit_start(self, step: int) -> None:
        """Plan the first save of this start."""
        self._timed, self.next = step + FIRST // 2, step + FIRST

    def is_due(self, state: State, event: Event) -> bool:
        """Return whether to save now: at the planned step, and at the end of training."""
        step, elapsed = state.timestamp.batch.value, state.get_elapsed_duration()
        if event is Event.BATCH_CHECKPOINT and step == self._timed:
            self._since = monotonic()
        is_planned = event is Event.BATCH_CHECKPOINT and step >= self.next
        return is_planned or (elapsed is not None and elapsed >= 1.0)

    def begin(self) -> None:
        """Record the begin of a save."""
        self._began = monotonic()

    def end(self, step: int) -> None:
        """Record the end of a save; plan the next one. All ranks call it together."""
        self.next = step + from_rank_zero(lambda: self._plan(step))

    def _plan(self, step: int) -> int:
        """Return the number of steps to the next save."""
        now, steps = monotonic(), step - self._timed
        self._costs.append(now - self._began)
        if steps <= 0:  # saved before the timing began, for an evaluation
            return FIRST
        pace = (self._began - self._since) / steps
        self._timed, self._since = step, now
        cost = statistics.median(self._costs)
        seconds = best_interval(cost, self.between)
        planned = max(1, round(seconds / pace))
        if not 1 / _SAID_AGAIN < seconds / (self._said or math.inf) < _SAID_AGAIN:
            self._said = seconds
            nodes = f" (of one node / {self._nodes})" if self._nodes > 1 else ""
            print(
                f"save_interval: auto saves every {seconds:.3g} s, about {planned} steps: training "
                f"waits {cost:.2g} s for a save, and a failure is expected every "
                f"{self.between / 3600:.3g} h{nodes}",
                flush=True,
            )
        return planned
