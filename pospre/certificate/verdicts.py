"""Verdicts of a certificate: a run against the undisturbed one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pospre.certificate.step_records import DRAWN, ProcessRecord, Step

TOLERANCE = 1e-5
"""Relative tolerance of losses and weights if the order of sums differs."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one property of one run."""

    property: str
    holds: bool
    text: str  # ``equal``, the size of the difference, or where it starts
    step: int | None = None  # the first that differs


def compare(
    reference: ProcessRecord,
    processes: Sequence[ProcessRecord],
    *,
    exact: bool,
    values: tuple[Path, Path],
) -> list[Verdict]:
    """Return a verdict for every property of a run compared with the undisturbed one.

    Steps trained twice are compared twice. Unless ``exact``, losses and weights may differ by
    ``TOLERANCE``; ``values`` are the files of the final weights of both.
    """
    expected = {step.number: step for step in reference.steps}
    steps = [step for process in processes for step in process.steps]
    verdicts = [_coverage(expected, steps)]
    same = (*DRAWN, "losses", "parameters") if exact else DRAWN
    verdicts += [_equal(name, expected, steps) for name in same]
    if exact:
        return [*verdicts, *_equal_ends(reference, processes)]
    return [*verdicts, _close_losses(expected, steps), _close_values(*values)]


def _coverage(expected: dict[int, Step], steps: Sequence[Step]) -> Verdict:
    numbers = [step.number for step in steps]
    missing = sorted(set(expected) - set(numbers))
    if missing:
        return Verdict("steps", False, f"step {missing[0]} was never trained", missing[0])
    return Verdict("steps", True, f"{len(expected)}, and {len(steps) - len(expected)} again")


def _equal(name: str, expected: dict[int, Step], steps: Sequence[Step]) -> Verdict:
    different = [
        step.number for step in steps if step.value(name) != expected[step.number].value(name)
    ]
    if different:
        return Verdict(name, False, f"differ from step {min(different)} on", min(different))
    return Verdict(name, True, "equal")


def _close_losses(expected: dict[int, Step], steps: Sequence[Step]) -> Verdict:
    worst, at = 0.0, 0
    for step in steps:
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
        first, second = (
            np.concatenate([file[name].ravel() for name in before], dtype=np.float64)
            for file in (before, after)
        )
    distance = float(np.linalg.norm(second - first) / np.linalg.norm(first))
    holds = distance <= TOLERANCE
    return Verdict("parameters", holds, f"{'within' if holds else 'differ by'} {distance:.1e}")


def _equal_ends(reference: ProcessRecord, processes: Sequence[ProcessRecord]) -> list[Verdict]:
    """Compare the final state; a run ended by SIGTERM also has an earlier one."""
    before = reference.end or {}
    ends = [each.end for each in processes if each.end and each.end["end"] == before["end"]]
    after = ends[-1] if ends else {}
    verdicts = []
    for name in ("optimiser", "random"):
        same = before[name] == after.get(name)
        verdicts.append(Verdict(name, same, "equal" if same else "differs in the end"))
    return verdicts
