"""Rate, weight decay, momentum and temperature of every step, as the papers' code has them.

Written down from their rules, apart from ``pospre``, or asked of timm itself. A rule is given the
steps of an epoch and returns its value at a step, counted from 0; a rate also takes the factor of
a parameter group (layer decay).
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from timm.scheduler import CosineLRScheduler

Rate = Callable[[int, float], float]
Value = Callable[[int], float]
RateRule = Callable[[int], Rate]
ValueRule = Callable[[int], Value]


def mae(peak: float, warmup: int, epochs: int, floor: float = 0.0) -> RateRule:
    """MAE, LUT, DropPos, UM-MAE (util/lr_sched.py): by fractional epochs, before every step."""

    def rule(per_epoch: int) -> Rate:
        def rate(step: int, factor: float) -> float:
            epoch = step / per_epoch
            if epoch < warmup:
                return factor * peak * epoch / warmup
            turn = math.cos(math.pi * (epoch - warmup) / (epochs - warmup))
            return factor * (floor + (peak - floor) * 0.5 * (1.0 + turn))

        return rate

    return rule


def deit(peak: float, epochs: int) -> RateRule:
    """DeiT (main.py): timm's cosine in epochs, stepped with the number of the epoch just done."""

    def rule(per_epoch: int) -> Rate:
        @cache
        def after(done: int | None) -> float:
            optimizer = _optimizer(peak)
            scheduler = CosineLRScheduler(
                optimizer, t_initial=epochs, lr_min=1e-5, warmup_lr_init=1e-6, warmup_t=5
            )
            if done is not None:
                scheduler.step(done)
            return _rate(optimizer)

        def rate(step: int, factor: float) -> float:
            epoch = step // per_epoch
            return factor * after(epoch - 1 if epoch else None)

        return rate

    return rule


def simmim_cosine(peak: float, warmup: int, epochs: int, *, start: float, floor: float) -> RateRule:
    """SimMIM's cosine (lr_scheduler.py): timm's in updates, stepped with the update just done."""

    def rule(per_epoch: int) -> Rate:
        @cache
        def scheduler_of(factor: float) -> tuple[torch.optim.Optimizer, CosineLRScheduler]:
            optimizer = _optimizer(peak * factor)
            scheduler = CosineLRScheduler(
                optimizer,
                t_initial=epochs * per_epoch,
                lr_min=floor,
                warmup_lr_init=start,
                warmup_t=warmup * per_epoch,
                cycle_limit=1,
                t_in_epochs=False,
            )
            return optimizer, scheduler

        def rate(step: int, factor: float) -> float:
            optimizer, scheduler = scheduler_of(factor)
            if step == 0:
                return start
            scheduler.step_update(step - 1)
            return _rate(optimizer)

        return rate

    return rule


def simmim_multistep(peak: float, warmup: int, milestone: int, *, start: float) -> RateRule:
    """SimMIM's ViT: warm-up, then × 0.1 at the milestone, stepped with the update just done."""

    def rule(per_epoch: int) -> Rate:
        def rate(step: int, factor: float) -> float:
            assert factor == 1.0
            done = max(step - 1, 0)
            if done < warmup * per_epoch:
                return start + done * (peak - start) / (warmup * per_epoch)
            return peak * 0.1 ** bisect_right([milestone * per_epoch], done)

        return rate

    return rule


def ijepa(
    start: float, peak: float, floor: float, warmup: int, epochs: int, fixed: int | None = None
) -> RateRule:
    """I-JEPA and StoP: the scheduler counts a step before it is taken; StoP's H stops at 250."""

    def rule(per_epoch: int) -> Rate:
        def rate(step: int, factor: float) -> float:
            count = min(step + 1, (epochs if fixed is None else fixed) * per_epoch)
            ramp, rest = warmup * per_epoch, (epochs - warmup) * per_epoch
            if count < ramp:
                return factor * (start + count / ramp * (peak - start))
            turn = math.cos(math.pi * (count - ramp) / rest)
            return factor * max(floor, floor + (peak - floor) * 0.5 * (1.0 + turn))

        return rate

    return rule


def ijepa_decay(epochs: int, fixed: int | None = None) -> ValueRule:
    """I-JEPA's and StoP's weight decay, .04 to .4, counted in the same way."""

    def rule(per_epoch: int) -> Value:
        def decay(step: int) -> float:
            count = min(step + 1, (epochs if fixed is None else fixed) * per_epoch)
            turn = math.cos(math.pi * count / (epochs * per_epoch))
            return min(0.4, 0.4 + (0.04 - 0.4) * 0.5 * (1.0 + turn))

        return decay

    return rule


def ijepa_momentum(epochs: int) -> ValueRule:
    """I-JEPA's and StoP's momentum: a straight line, its first value after the first step."""
    return lambda per_epoch: lambda step: 0.996 + step * (1.0 - 0.996) / (per_epoch * epochs)


def dinov2(base: float, end: float, epochs: float, warmup: float = 0, start: float = 0) -> RateRule:
    """DINOv2's CosineScheduler, read at the step; epochs may be fractions of a pass."""

    def rule(per_epoch: int) -> Rate:
        total, ramp = round(epochs * per_epoch), round(warmup * per_epoch)
        steps = np.arange(total - ramp)
        cosine = end + 0.5 * (base - end) * (1 + np.cos(np.pi * steps / len(steps)))
        values = np.concatenate([np.linspace(start, base, ramp), cosine])
        return lambda step, factor: float(factor * values[step])

    return rule


def dinov2_value(base: float, end: float, epochs: float) -> ValueRule:
    """DINOv2's weight decay and momentum (LUT's, too): a half cosine over the whole training."""

    def rule(per_epoch: int) -> Value:
        rate = dinov2(base, end, epochs)(per_epoch)
        return lambda step: rate(step, 1.0)

    return rule


def dinov2_temperature(start: float, end: float, warmup: float) -> ValueRule:
    """DINOv2's temperature of the teacher: numpy's linspace over the warm-up, then its end."""

    def rule(per_epoch: int) -> Value:
        ramp = np.linspace(start, end, round(warmup * per_epoch))
        return lambda step: float(ramp[step]) if step < len(ramp) else end

    return rule


def speech(step: int, factor: float) -> float:
    """MP3's speech model: 1e-4 for 500 updates, then 1e-3, halved every 10,000 updates."""
    return factor * (1e-4 if step < 500 else 1e-3 * 0.5 ** (step // 10_000))


def _optimizer(rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])
