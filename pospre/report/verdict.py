"""What came of a run, in one sentence: its figures beside those of the untrained model."""

import math

from pospre.report.evaluations import Knn, PatchPosition, PositionGrid
from pospre.report.plots import format_value
from pospre.report.run import Run
from pospre.report.summary import accuracy_of, earlier_step, start_of, trained_on_these

_ALIKE = 1.05  # times as often: below it, and above its inverse, two shares are called the same


def verdict(
    run: Run, grid: PositionGrid | None, patches: PatchPosition | None, knn: Knn | None
) -> str:
    """Return a sentence about what was measured; empty where nothing was that it knows."""
    parts = {}
    if grid is not None:
        parts["position_grid"] = _places(grid.mean, grid.initial_mean, grid.guess_mean)
    if patches is not None and patches.mean is not None:
        parts["patch_position"] = _places(patches.mean, patches.initial_mean, patches.chance)
    top1 = accuracy_of(run)
    if top1 is not None:
        start = start_of(run)
        origin = f", started from {start}" if start else ""
        parts["accuracy"] = f"it names the class of {_percent(top1)} of the pictures{origin}"
    if knn is not None:
        parts["knn"] = _neighbours(knn)
    if not parts:
        return ""
    limits = {name: _limits(run, name) for name in parts}
    if len({*limits.values()}) == 1:  # said once
        sentence = "; ".join(parts.values()) + limits.popitem()[1]
    else:
        sentence = "; ".join(words + limits[name] for name, words in parts.items())
    return f"{sentence[0].upper()}{sentence[1:]}."


def _places(share: float, untrained: float | None, guessing: float) -> str:
    """Say how much more often patches are put in their place."""
    other, whose = (guessing, "guessing") if untrained is None else (untrained, "untrained")
    if other <= 0:
        return f"it puts {_percent(share)} of the patches in place, {whose} none"
    ratio = share / other
    if 1 / _ALIKE < ratio < _ALIKE:
        return f"it puts patches in place no more often than {whose}"
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"it puts patches in place {times} times as often as {whose}"


def _neighbours(knn: Knn) -> str:
    """Say whether nearest neighbours name the class better than before training.

    Both are measured on the same pictures; the errors are added as if these were others.
    """
    if knn.initial_top1 is None:
        return f"its kNN top-1 is {_percent(knn.top1)}, guessing {_percent(knn.chance)}"
    variance = knn.initial_top1 * (1 - knn.initial_top1) / knn.query_samples
    gain, error = knn.top1 - knn.initial_top1, math.hypot(knn.standard_error, math.sqrt(variance))
    if abs(gain) <= 2 * error:
        points = f"{100 * gain:+.1f} ± {100 * error:.1f} points"
        return f"its kNN is within two errors of untrained ({points})"
    points = f"{100 * abs(gain):.1f} ± {100 * error:.1f} points"
    return f"its kNN is {points} {'above' if gain > 0 else 'below'} untrained"


def _limits(run: Run, name: str) -> str:
    """Say what may mislead: pictures that it was trained on, weights of an earlier step."""
    words = ["on pictures it was trained on"] if trained_on_these(run, name) else []
    step = earlier_step(run, name)
    words += [f"weights {step}"] if step else []
    return f" ({', '.join(words)})" if words else ""


def _percent(value: float) -> str:
    return format_value(value, percent=True)
