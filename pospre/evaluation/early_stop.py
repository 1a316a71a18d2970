"""The end of a run that is worse than its start: ``verdict.stop: worse``.

It follows from ``history.jsonl`` alone, so a resumed run decides the same.
"""

from pathlib import Path

from pospre.evaluation.verdict import is_worse, split_figure
from pospre.recipe.monitoring import Verdict
from pospre.training.callbacks.metrics import read_lines

_LOOKS = 20
_QUARTER = _LOOKS // 4
_IN_A_ROW = 3


def look_steps(total_steps: int) -> list[int]:
    """Return the steps after which a run of this length is looked at, but for its last one."""
    steps = {round(total_steps * look / _LOOKS) for look in range(_QUARTER + 1, _LOOKS)}
    return sorted(steps - {0, total_steps})


def reason_to_stop(verdict: Verdict, history: Path, step: int, total_steps: int) -> str | None:
    """Return why a run ends after a step, if the last looks were all worse; else None.

    Args:
        verdict: with a figure.
        history: the run's results at its looks, with those of this step.
        step: the last one.
        total_steps: of the whole run.
    """
    assert verdict.figure is not None
    looks = look_steps(total_steps)
    due = [look for look in looks if look <= step][-_IN_A_ROW:]
    if len(due) < _IN_A_ROW or due[-1] != step:
        return None
    name, _ = split_figure(verdict.figure)
    found = {line["step"]: line for line in read_lines(history) if line.get("name") == name}
    if not all(look in found and is_worse(verdict, found[look]) for look in due):
        return None
    return (
        f"{verdict.figure} was worse than the frozen start's after steps "
        f"{', '.join(map(str, due))}, so the run ends here (verdict.stop: worse); the same command "
        "with verdict.stop=null goes on"
    )
