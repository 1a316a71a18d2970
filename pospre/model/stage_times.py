"""Stages of a training in steps: where each begins, and the ramps of what begins to train."""

from bisect import bisect_right
from collections.abc import Sequence

from pospre.errors import UserError
from pospre.recipe.sections import Stage
from pospre.schedules import duration_steps

_RAMP, _RAMP_STEPS = 0.02, 50


class StageTimes:
    """The steps of stages; see ``Stages`` for the arguments.

    Attributes:
        options: the stages, as in a recipe.
        starts: the first step of every stage, counted from 0.
        ramps: the steps in which the rate of what begins to train rises, of every stage.
    """

    def __init__(
        self,
        options: Sequence[Stage],
        total_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        passed: Sequence[int],
    ) -> None:
        self.options, self.total_steps = options, total_steps
        self.steps_per_epoch, self.batch_size = steps_per_epoch, batch_size
        self.starts = self._find_starts(passed)
        self.ramps = [self._ramp(number) for number in range(len(options))]

    def at(self, step: int) -> int:
        """Return the number of the stage that a step, counted from 0, belongs to."""
        return bisect_right(self.starts, step) - 1

    def end(self, number: int) -> int:
        """Return the number of steps after which a stage ends."""
        return [*self.starts[1:], self.total_steps][number]

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return for every stage the first step of its schedule, and the schedule's steps.

        They are 0 and ``length``, the whole run's, or with ``restart`` the stage's own.
        """
        own = [(start, self.end(number) - start) for number, start in enumerate(self.starts)]
        pairs = zip(self.options, own, strict=True)
        return [span if stage.restart else (0, length) for stage, span in pairs]

    def factor(self, life: Sequence[bool], step: int) -> float:
        """Return the factor of a tensor's rate at a step, counted from 0: its ramp, or 0.

        ``life`` is the tensor's, and the key ``life`` of its group in the optimiser.
        """
        first = number = self.at(step)
        if not life[number]:
            return 0.0
        while first > 0 and life[first - 1]:
            first -= 1
        done = step - self.starts[first] + 1
        return 1.0 if first == 0 else min(1.0, done / self.ramps[first])

    def _steps(self, length: float | str) -> int:
        if isinstance(length, float):
            return round(length * self.total_steps)
        return duration_steps(
            length, steps_per_epoch=self.steps_per_epoch, batch_size=self.batch_size
        )

    def _find_starts(self, passed: Sequence[int]) -> list[int]:
        starts, last = [0], len(self.options) - 1
        for number, stage in enumerate(self.options):
            key, until = f"stages.{number}.until", stage.until
            if (until is None) != (number == last):
                raise UserError(
                    f"{key} is missing; give the stage's end, such as 0.15 or 500ba: only the last "
                    "stage ends with the run"
                    if until is None
                    else f"{key} = {until}, but the last stage ends with the run; leave it out, or "
                    "add a stage after this one"
                )
            if until is None:
                break
            end, before = self._steps(until), self.options[number - 1].until if number else None
            if len(passed) > number + 1:
                starts.append(passed[number + 1])
                continue
            if isinstance(until, float) and isinstance(before, float):
                rises = until > before
            else:
                rises = before is None or end > starts[-1]
            if not rises:
                raise UserError(
                    f"{key} = {until} is step {end}, but the stage before ends at step "
                    f"{starts[-1]}; the ends of stages must rise"
                )
            starts.append(max(starts[-1] + 1, end))
            if starts[-1] + last - number > self.total_steps:
                raise UserError(
                    f"{key} = {until} is step {starts[-1]}, but the run (trainer.max_duration) has "
                    f"{self.total_steps} steps, and each stage after it needs one. Give an "
                    "earlier end, or a longer run"
                )
        return starts

    def _ramp(self, number: int) -> int:
        given, length = self.options[number].ramp, self.end(number) - self.starts[number]
        if number == 0:
            if given is not None:
                raise UserError(
                    f"stages.0.ramp = {given}, but the first stage begins with the warm-up: use "
                    "schedule.warmup"
                )
            return 1
        if given is None:
            return min(max(_RAMP_STEPS, round(_RAMP * self.total_steps)), length)
        steps = max(1, self._steps(given))
        if steps > length:
            raise UserError(
                f"stages.{number}.ramp = {given} is {steps} steps, but the stage has {length}; "
                "give a shorter one, or null"
            )
        return steps
