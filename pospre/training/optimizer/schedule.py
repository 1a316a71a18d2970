"""The learning rate and the weight decay of every step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from pospre.errors import UserError
from pospre.model.stages import Stages
from pospre.recipe.sections import Optimizer, Schedule
from pospre.schedules import cosine_warmup, duration_steps, half_cosine, staircase, warm_up

_COUNTS = ("last_epoch", "_step_count")


class StepSchedule(LambdaLR):
    """Sets the learning rates and the weight decay of step t at step t.

    It counts its own steps. Composer's schedulers read the clock before it advances, so each step
    would get its predecessor's rate. ``rates`` are each group's share of its peak at a step,
    ``decay`` is the weight decay of groups with decay, ``steps_per_epoch`` the unit of their
    ``frozen``. In ``stages`` a group's rate is 0 while it is frozen, then rises over a ramp.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Sequence[Callable[[int], float]],
        decay: Callable[[int], float],
        steps_per_epoch: int,
        total_steps: int,
        stages: Stages | None = None,
    ) -> None:
        groups = optimizer.param_groups
        self.decay, self.total_steps = decay, total_steps
        self.decayed = [group["decayed"] for group in groups]
        shares = [
            _after(group["frozen"] * steps_per_epoch, rate)
            for group, rate in zip(groups, rates, strict=True)
        ]
        if stages is not None:
            pairs = zip(groups, shares, strict=True)
            shares = [_in_stages(stages, group["life"], share) for group, share in pairs]
        super().__init__(optimizer, shares)

    def get_lr(self) -> list[Any]:
        """Set the weight decay of the next step and return its learning rates."""
        for group, decayed in zip(self.optimizer.param_groups, self.decayed, strict=True):
            if decayed:
                group["weight_decay"] = self.decay(self.last_epoch)
        pairs = zip(self.base_lrs, self.lr_lambdas, strict=True)
        return [rate * share(self.last_epoch) for rate, share in pairs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step count; the next step gets the rates of this recipe's length."""
        self.last_epoch, self._step_count = (int(state_dict[key]) for key in _COUNTS)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the step count and the rates; everything else follows from the recipe."""
        return {key: getattr(self, key) for key in (*_COUNTS, "_last_lr")}


def _after(start: int, rate: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: 0.0 if step < start else rate(step)


def _in_stages(
    stages: Stages, life: Sequence[bool], rate: Callable[[int], float]
) -> Callable[[int], float]:
    return lambda step: stages.factor(life, step) * rate(step)


def build_schedule(
    optimizer: torch.optim.Optimizer,
    options: Schedule,
    *,
    rates: Optimizer,
    max_duration: str,
    steps_per_epoch: int,
    batch_size: int,
    stages: Stages | None = None,
) -> StepSchedule:
    """Return the schedule of learning rate and weight decay.

    ``rates`` are the recipe's ``optimizer``, from which ``optimizer`` was made; ``max_duration`` is
    that of the whole run, such as ``100ep``, and ``batch_size`` is over all ranks. ``UserError`` if
    options contradict each other or the length of the run.
    """

    def steps(duration: str) -> int:
        return duration_steps(duration, steps_per_epoch=steps_per_epoch, batch_size=batch_size)

    total_steps = steps(max_duration)
    peak, groups = optimizer.defaults["lr"], optimizer.param_groups
    peaks = [peak if options.scale_floors else group["lr"] for group in groups]
    _check(options, min(filter(None, peaks), default=peak), steps(options.warmup), total_steps)
    if stages is not None:
        _check_restarts(options, steps(options.warmup), stages)
    length = steps(options.length) if options.length else total_steps
    fixed = steps(options.fix_after) if options.fix_after else max(total_steps, length)
    unit = steps_per_epoch if options.unit == "epoch" else 1
    end = rates.weight_decay if rates.weight_decay_end is None else rates.weight_decay_end

    def moment(step: int) -> int:
        return min(max((step // unit + options.offset) * unit, 0), fixed)

    spans = [(0, length)] if stages is None else stages.spans(length)

    def rate(peak: float) -> Callable[[int], float]:
        shares = [_share(options, peak, steps, whole) for _, whole in spans]

        def share(step: int) -> float:
            number = 0 if stages is None else stages.at(step)
            return shares[number](moment(step - spans[number][0]))

        return share

    return StepSchedule(
        optimizer,
        [rate(peak) for peak in peaks],
        lambda step: half_cosine(rates.weight_decay, end, moment(step) / length),
        steps_per_epoch,
        total_steps,
        stages,
    )


def _share(
    options: Schedule, peak: float, steps: Callable[[str], int], length: int
) -> Callable[[int], float]:
    """Return the learning rate by step, as a share of the peak (for a peak of 0: constant 1)."""
    warmup, endpoint = steps(options.warmup), options.warmup_endpoint
    start, floor = (rate / peak if peak else 0.0 for rate in (options.start_lr, options.min_lr))
    if options.name == "cosine":
        return lambda step: cosine_warmup(
            step,
            warmup_steps=warmup,
            total_steps=length,
            floor=floor,
            start=start,
            prefix=options.warmup_prefix,
            endpoint=endpoint,
        )
    milestones: Sequence[int] = [steps(milestone) for milestone in options.milestones]
    if options.every is not None:
        every = steps(options.every)
        milestones = range(every, length + 1, every)
    held = options.name == "step"

    def share(step: int) -> float:
        if step < warmup:
            line = warm_up(step, warmup_steps=warmup, start=start, endpoint=endpoint)
            return start if held else line
        return max(floor, staircase(step, milestones=milestones, gamma=options.gamma))

    return share


def _check_restarts(options: Schedule, warmup: int, stages: Stages) -> None:
    for number, stage in enumerate(stages.options):
        key, steps = f"stages.{number}.restart", stages.end(number) - stages.starts[number]
        if stage.restart and options.name == "constant" and not warmup:
            raise UserError(
                f"{key} = true, but schedule.name = constant without schedule.warmup has nothing "
                "to begin anew; leave it out"
            )
        if stage.restart and warmup >= steps:
            raise UserError(
                f"{key} = true, but schedule.warmup = {options.warmup} is {warmup} steps, and the "
                f"stage has {steps}; shorten the warm-up, or leave restart out"
            )


def _check(options: Schedule, peak: float, warmup: int, total_steps: int) -> None:
    if warmup >= total_steps:
        raise UserError(
            f"schedule.warmup = {options.warmup} is {warmup} steps, but the whole run "
            f"(trainer.max_duration) has only {total_steps}; shorten the warm-up"
        )
    for key, rate in (("min_lr", options.min_lr), ("start_lr", options.start_lr)):
        if rate > peak:
            slowest = "" if options.scale_floors else ", of the slowest parameters,"
            raise UserError(f"schedule.{key} = {rate} is above the peak rate{slowest} {peak:g}")
    if not options.warmup_prefix and options.name != "cosine":
        raise UserError(
            f"schedule.name = {options.name} does not take schedule.warmup_prefix = false: only "
            "a cosine can start during the warm-up"
        )
    for key, value, name in (
        ("milestones", options.milestones, "multistep"),
        ("every", options.every, "step"),
    ):
        if bool(value) != (options.name == name):
            change = "needs" if options.name == name else "does not take"
            raise UserError(f"schedule.name = {options.name} {change} schedule.{key}")
