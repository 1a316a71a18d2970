"""Pure functions of training progress: the learning rate, and linear schedules.

Nothing here has state, so a resumed run reads the same values as an uninterrupted one.
"""

import math
import re
from collections.abc import Sequence

from pospre.errors import UserError

DURATION = re.compile(r"(\d+)(ep|ba|sp)")


def linear(start: float, end: float, fraction: float) -> float:
    """Return the point at ``fraction`` (clamped to [0, 1]) of the way from ``start`` to ``end``."""
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


def half_cosine(start: float, end: float, fraction: float) -> float:
    """Return the value at ``fraction`` (clamped to [0, 1]) of half a cosine between two ends."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))


def cosine_warmup(
    step: float,
    *,
    warmup_steps: float,
    total_steps: float,
    floor: float = 0.0,
    start: float = 0.0,
    prefix: bool = True,
    endpoint: bool = False,
) -> float:
    """Return the learning rate at ``step`` as a share of its peak: MAE's schedule, per step.

    Linear from ``start`` over ``warmup_steps``, then half a cosine from 1 down to ``floor``,
    reached at ``total_steps`` and kept. (facebookresearch/mae, ``util/lr_sched.py``; I-JEPA starts
    above 0.)

    Args:
        step: counted from 0.
        warmup_steps: length of the warm-up.
        total_steps: end of the cosine.
        floor: value at its end.
        start: value at the start of the warm-up.
        prefix: the cosine starts after the warm-up. False: it starts at step 0, and the warm-up
            hides its beginning (timm's ``warmup_prefix``).
        endpoint: see ``warm_up``.
    """
    if step < warmup_steps:
        return warm_up(step, warmup_steps=warmup_steps, start=start, endpoint=endpoint)
    begin = warmup_steps if prefix else 0.0
    return half_cosine(1.0, floor, (step - begin) / max(total_steps - begin, 1e-12))


def warm_up(step: float, *, warmup_steps: float, start: float, endpoint: bool) -> float:
    """Return the value at ``step`` of a linear ramp from ``start`` to 1.

    It reaches 1 at the step after the warm-up, or at its last step with ``endpoint`` (numpy's
    ``linspace``, DINOv2).
    """
    return linear(start, 1.0, step / max(warmup_steps - endpoint, 1))


def staircase(step: float, *, milestones: Sequence[float], gamma: float) -> float:
    """Return ``gamma`` to the power of the milestones that ``step`` has reached."""
    return gamma ** sum(step >= milestone for milestone in milestones)


def duration_steps(duration: str, *, steps_per_epoch: int, batch_size: int) -> int:
    """Return the number of steps in ``10ep`` (epochs), ``500ba`` (batches) or ``9000sp`` (samples).

    Samples are rounded up to whole batches of ``batch_size``, as Composer trains them.
    """
    match = DURATION.fullmatch(duration)
    if match is None:
        raise UserError(f"'{duration}' is not a duration; write 10ep, 500ba or 100000sp")
    count, unit = int(match[1]), match[2]
    if unit == "ep":
        return count * steps_per_epoch
    return count if unit == "ba" else math.ceil(count / batch_size)
