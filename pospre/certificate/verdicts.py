"""Comparison of two runs of a recipe, property by property."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pospre.certificate.step_records import DRAWN, ProcessRecord, Step

TOLERANCE = 1e-5
"""Relative tolerance of losses and weights if the order of sums differs."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one property of one run.

    Attributes:
        property: its name.
        holds: whether it is as required.
        text: ``equal``, the size of the difference, or where it starts.
        step: the first step that differs, if any.
    """

    property: str
    holds: bool
    text: str
    step: int | None = None


def compare(
    reference: ProcessRecord,
    processes: Sequence[ProcessRecord],
    *,
    exact: bool,
    values: tuple[Path, Path],
) -> list[Verdict]:
    """Return a verdict for every property of a run compared with the undisturbed one.

    Args:
        reference: the one process of the undisturbed run.
        processes: of the other run, in order; steps trained twice are compared twice.
        exact: losses, metrics and state must be bit-equal; otherwise losses and weights may differ
            by ``TOLERANCE``.
        values: files of the final weights of both.
    """
    expected = {step.number: step for step in reference.steps}
    found = [step for process in processes for step in process.steps]
    verdicts = [_coverage(expected, found)]
    for name in DRAWN:

        def drawn(step: Step, name: str = name) -> str:
            return step.rows.get(name, "")

        verdicts.append(_equal(name, expected, found, drawn))
    if not exact:
        return [*verdicts, _close_losses(expected, found), _close_values(*values)]
    verdicts.append(_equal("losses", expected, found, lambda step: step.losses))
    verdicts.append(_equal("parameters", expected, found, lambda step: step.parameters))
    return [*verdicts, *_equal_ends(reference, processes)]


def check_lost(
    processes: Sequence[ProcessRecord], ends: Sequence[str], whole: Sequence[int]
) -> Verdict:
    """Return a verdict about finished steps that were lost when a process ended.

    Args:
        processes: of the run.
        ends: how each except the last ended.
        whole: the step of the newest complete checkpoint that each of these left. No step up to it
            may be lost, and none at all if a process could save before its end.
    """
    done, worst, bad = 0, 0, ""
    for before, after, end, kept in zip(processes[:-1], processes[1:], ends, whole, strict=True):
        done = before.steps[-1].number if before.steps else done
        if after.start is None:  # it ended before that
            continue
        lost = done - after.start
        if after.start < kept or (lost and end == "by SIGTERM"):
            bad = bad or f"{lost} of {done}, where a process ended {end}; {kept} were saved"
        worst, done = max(worst, lost), after.start
    return Verdict("steps lost", not bad, bad or f"at most {worst}, none of a whole checkpoint")


def _coverage(expected: dict[int, Step], found: Sequence[Step]) -> Verdict:
    numbers = [step.number for step in found]
    missing = sorted(set(expected) - set(numbers))
    if missing:
        return Verdict("steps", False, f"step {missing[0]} was never trained", missing[0])
    return Verdict("steps", True, f"{len(expected)}, and {len(found) - len(expected)} again")


def _equal(
    name: str, expected: dict[int, Step], found: Sequence[Step], value: Callable[[Step], object]
) -> Verdict:
    different = [step.number for step in found if value(step) != value(expected[step.number])]
    if different:
        return Verdict(name, False, f"differ from step {min(different)} on", min(different))
    return Verdict(name, True, "equal")


def _close_losses(expected: dict[int, Step], found: Sequence[Step]) -> Verdict:
    worst, at = 0.0, 0
    for step in found:
        for name, value in expected[step.number].losses.items():
            if name.startswith("metric/"):  # may couple a batch's samples; not trained
                continue
            other = step.losses.get(name, math.nan)
            distance = abs(other - value) / max(abs(value), 1.0)
            if not distance <= worst:
                worst, at = distance, step.number
    holds = worst <= TOLERANCE
    text = f"within {worst:.1e}" if holds else f"differ by {worst:.1e}, most at step {at}"
    return Verdict("losses", holds, text, None if holds else at)


def _close_values(reference: Path, other: Path) -> Verdict:
    with np.load(reference) as before, np.load(other) as after:
        apart = sum(_square(after[name] - before[name]) for name in before)
        distance = math.sqrt(apart / sum(_square(before[name]) for name in before))
    holds = distance <= TOLERANCE
    return Verdict("parameters", holds, f"{'within' if holds else 'differ by'} {distance:.1e}")


def _equal_ends(reference: ProcessRecord, processes: Sequence[ProcessRecord]) -> list[Verdict]:
    """Compare the final state; a run ended by SIGTERM also has an earlier one."""
    before = reference.end or {}
    ends = [
        process.end for process in processes if process.end and process.end["end"] == before["end"]
    ]
    after = ends[-1] if ends else {}
    verdicts = []
    for name in ("optimiser", "random"):
        same = before[name] == after.get(name)
        verdicts.append(Verdict(name, same, "equal" if same else "differs in the end"))
    return verdicts


def _square(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())
