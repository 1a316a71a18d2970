"""Pure functions of training progress: learning rate, and any value that moves in a straight line.

Nothing here remembers anything, so a resumed run reads the same values as an uninterrupted one.
"""

import math
import re

from pospre.errors import UserError

DURATION = re.compile(r"(\d+)(ep|ba|sp)")


def linear(start: float, end: float, fraction: float) -> float:
    """Return the point at ``fraction`` (clamped to [0, 1]) of the way from ``start`` to ``end``."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


def cosine_warmup(
    step: float, *, warmup_steps: float, total_steps: float, floor: float = 0.0
) -> float:
    """Return the learning rate at ``step`` as a share of its peak: MAE's schedule, per step.

    A straight line from 0 over ``warmup_steps``, then half a cosine from 1 down to ``floor``, which
    is reached at ``total_steps`` and kept. (facebookresearch/mae, ``util/lr_sched.py``.)
    """
    if step < warmup_steps:
        return step / warmup_steps
    span = max(total_steps - warmup_steps, 1e-12)
    fraction = min((step - warmup_steps) / span, 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fraction))


def peak_rate(base_lr: float, batch_size: int) -> float:
    """Return MAE's linear scaling rule: ``base_lr`` is meant for a global batch of 256 samples."""
    return base_lr * batch_size / 256


def duration_steps(duration: str, *, steps_per_epoch: int, batch_size: int) -> int:
    """Return the number of steps in ``10ep`` (epochs), ``500ba`` (batches) or ``9000sp`` (samples).

    Samples are rounded up to whole batches of ``batch_size``, as Composer trains them.
    """
    match = DURATION.fullmatch(duration)
    if match is None:
        raise UserError(f"'{duration}' is no duration; write for instance 10ep, 500ba or 100000sp")
    count, unit = int(match[1]), match[2]
    if unit == "ep":
        return count * steps_per_epoch
    return count if unit == "ba" else math.ceil(count / batch_size)
