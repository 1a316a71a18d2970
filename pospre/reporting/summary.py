"""The page's text about a run: its task, headline figures, and results."""

from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

from pospre.model.task_description import TaskDescription
from pospre.reporting.plots import Record, format_value
from pospre.reporting.run import Classified, PatchPosition, PlacedPatches, PositionGrid, Run
from pospre.schedules import DURATION
from pospre.untrusted_json import is_number

_LONGEST = 1e10  # seconds, of a duration or since 1970
_ALIKE = 1.05  # shares within this factor are called equal, if the error is not known
_LABELS = {  # of a figure, and in a sentence
    "logistic": ("Logistic top-1", "its logistic probe"),
    "linear": ("Linear top-1", "its linear probe"),
    "knn": ("kNN top-1", "its kNN"),
}


class Asked(NamedTuple):
    """A pretext task of a run."""

    method: str
    pretext_task: TaskDescription
    answer: str  # the last value of its measure, in words; empty if none was logged


def pretext_tasks_of(run: Run) -> list[Asked]:
    """Return the tasks of the run's algorithms, in order of attachment."""
    return [Asked(name, each, _answer(run, name, each)) for name, each in run.pretext_tasks.items()]


def _answer(run: Run, name: str, task: TaskDescription) -> str:
    values = run.column(f"metric/{name}_{task.metric}")
    if task.metric is None or not values:
        return ""
    percent = task.metric in ("accuracy", "agreement")
    first, last = (
        format_value(value, percent=percent).replace(" ", "\N{NO-BREAK SPACE}")
        for value in (values[0], values[-1])
    )
    return f"{task.meaning}: {last}" + (f" (at first {first})" if len(values) > 1 else "")


class Figure(NamedTuple):
    """One headline figure: its name, its value, and a comparison."""

    label: str
    value: str
    note: str = ""


def headline(
    run: Run, grid: PositionGrid | None, classified: Mapping[str, Classified]
) -> list[Figure]:
    """Return the available headline figures of the run."""
    losses, figures = run.column("loss/total"), []
    if losses:
        note = f"from {format_value(losses[0])}" if len(losses) > 1 else ""
        figures.append(Figure("Final loss", format_value(losses[-1]), note))
    return [*figures, *_measured_figures(run, grid, classified), *_effort_figures(run)]


def _origin(run: Run) -> str:
    """Describe the initial weights; empty if they were random."""
    address = str(run.setting("encoder", "weights") or "")
    inside = address.rstrip("/").partition("/checkpoints")[0]  # runs are named by their folder
    return f"started from {inside.rpartition('/')[2]}" if inside else ""


def _measured_figures(
    run: Run, grid: PositionGrid | None, classified: Mapping[str, Classified]
) -> list[Figure]:
    figures = []

    def add(name: str, label: str, value: float, *notes: str) -> None:
        note = "; ".join(filter(None, (*notes, earlier_step(run, name))))
        figures.append(Figure(label, _percent(value), note))

    if grid is not None:
        beside = f"{_percent(grid.guess_mean)} by guessing"
        if grid.initial_mean is not None:
            points = _points(grid.mean_difference, grid.mean_difference_se)
            beside = f"{_percent(grid.initial_mean)} untrained; {points}"
        cells = f"mean of {len(grid.cells)} cells"
        add("position_grid", "Position top-1", grid.mean, cells, beside)
    top1 = _accuracy(run)
    if top1 is not None:
        add("accuracy", "Accuracy", top1, _origin(run))
    for name, results in classified.items():
        other = results.initial_top1
        points = _points(results.top1_difference, results.top1_difference_se)
        beside = "" if other is None else f"{_percent(other)} untrained; {points}"
        add(name, _LABELS[name][0], results.top1, beside)
    return figures


def _accuracy(run: Run) -> float | None:
    """Return the class head's accuracy from evaluation ``accuracy``."""
    top1 = run.evaluations.get("accuracy", {}).get("results", {}).get("top1")
    return top1 if is_number(top1) else None


def _effort_figures(run: Run) -> list[Figure]:
    figures = []
    throughput = run.column("throughput")
    if throughput:
        rate = float(f"{median(throughput):.3g}")
        figures.append(Figure("Images/s", format_value(rate), "median"))
    planned = {"ep": "", "ba": "", "sp": ""}  # planned duration, in its own unit
    duration = DURATION.fullmatch(str(run.setting("trainer", "max_duration")))
    if duration:
        planned[duration[2]] = f"of {format_value(float(duration[1]))}"
    epochs = run.column("epoch")
    if epochs:
        figures.append(Figure("Epoch", f"{epochs[-1] + 1:g}", planned["ep"]))  # logged from 0
    steps = run.column("step")
    if steps and planned["ba"]:
        figures.append(Figure("Step", format_value(steps[-1]), planned["ba"]))
    samples = run.column("samples")
    if samples:
        note = planned["sp"] or f"{format_value(steps[-1])} steps"
        figures.append(Figure("Samples seen", format_value(samples[-1]), note))
    seconds = _training_seconds(run.records)
    if 0 < seconds < _LONGEST:
        figures.append(Figure("Training time", format_seconds(seconds), "without pauses"))
    return figures


def _training_seconds(records: list[Record]) -> float:
    """Sum samples over throughput for all lines: the run may have been interrupted for days."""
    seconds = before = 0.0
    for record in records:
        samples, rate = record.get("samples"), record.get("throughput")
        if is_number(samples) and is_number(rate) and rate > 0:
            seconds += (samples - before) / rate
            before = samples
    return seconds


def subtitle(run: Run) -> str:
    """Describe in one line the method, the data and the date."""
    wanted = {"on": run.setting("encoder", "name"), "with": run.setting("data", "path")}
    words = [f"{word} {value}" for word, value in wanted.items() if value]
    what = " ".join(filter(None, [" + ".join(run.algorithms), *words, _origin(run)]))
    times = [seconds for seconds in run.column("time")[-1:] if 0 <= seconds < _LONGEST]
    when = [datetime.fromtimestamp(seconds, UTC) for seconds in times]
    dates = [f"last step {date:%Y-%m-%d %H:%M UTC}" for date in when]
    return " · ".join(filter(None, (what, *dates)))


def format_seconds(seconds: float) -> str:
    """Format a duration: ``42 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def verdict(
    run: Run,
    grid: PositionGrid | None,
    patches: PatchPosition | None,
    classified: Mapping[str, Classified],
) -> str:
    """Return a sentence about the measured results; empty if there are none."""
    parts = {}
    if grid is not None:
        parts["position_grid"] = _places(grid, grid.guess_mean)
    if patches is not None and patches.mean is not None:
        parts["patch_position"] = _places(patches, patches.chance)
    top1 = _accuracy(run)
    if top1 is not None:
        words = f"it names the class of {_percent(top1)} of the pictures"
        parts["accuracy"] = ", ".join(filter(None, (words, _origin(run))))
    for name, results in classified.items():
        parts[name] = _against_untrained(_LABELS[name][1], results)
    if not parts:
        return ""
    limits = [_limits(run, name) for name in parts]
    if len(set(limits)) == 1:  # mention it once
        limits = [""] * (len(parts) - 1) + limits[:1]
    sentence = "; ".join(map("".join, zip(parts.values(), limits, strict=True)))
    return f"{sentence[0].upper()}{sentence[1:]}."


def _places(results: PlacedPatches, guessing: float) -> str:
    """Describe how much more often patches are placed correctly."""
    share, other, whose = results.mean or 0.0, guessing, "guessing"
    if results.initial_mean is not None:
        other, whose = results.initial_mean, "untrained"
    gain, error = results.mean_difference, results.mean_difference_se
    if other <= 0:
        return f"it places {_percent(share)} of the patches correctly, {whose} none"
    ratio = share / other
    is_alike = 1 / _ALIKE < ratio < _ALIKE
    if gain is not None and error is not None:
        is_alike = abs(gain) <= 2 * error
    if is_alike:
        return f"it places patches correctly no more often than {whose}"
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"it places patches correctly {times} times as often as {whose}"


def _against_untrained(what: str, results: Classified) -> str:
    """Describe whether features predict the class better than those of the untrained model."""
    gain, error = results.top1_difference, results.top1_difference_se
    if gain is None or error is None:
        return f"{what} has {_percent(results.top1)} top-1, guessing {_percent(results.chance)}"
    if abs(gain) <= 2 * error:
        return f"{what} is within two errors of untrained ({_points(gain, error)})"
    side = "above" if gain > 0 else "below"
    return f"{what} is {_points(gain, error).lstrip('+-')} {side} untrained"


def _points(gain: float | None, error: float | None) -> str:
    """Write a difference to the untrained model, with its error."""
    spread = "" if error is None else f" ± {100 * error:.1f}"
    return f"{100 * (gain or 0):+.1f}{spread} points"


def _limits(run: Run, name: str) -> str:
    """Describe what may mislead: evaluation on training images, or weights of an earlier step."""
    words = ["on pictures it was trained on"] if trained_on_these(run, name) else []
    step = earlier_step(run, name)
    words += [f"weights {step}"] if step else []
    return f" ({', '.join(words)})" if words else ""


def _percent(value: float) -> str:
    return format_value(value, percent=True)


def measured_on(run: Run, name: str) -> str:
    """Describe the data and weights of evaluation ``name`` if they may mislead."""
    data = run.evaluations.get(name, {}).get("data")
    if not data:
        return ""
    trained = trained_on_these(run, name)
    words = f"measured on {data}" + (", the pictures it was trained on" if trained else "")
    step = earlier_step(run, name)
    return words + (f"; {step}, not of the last" if step else "")


def trained_on_these(run: Run, name: str) -> bool:
    """Return whether evaluation ``name`` used the training images."""
    data = run.evaluations.get(name, {}).get("data")
    return bool(data) and data == run.setting("data", "path")


def earlier_step(run: Run, name: str) -> str:
    """Describe the step of evaluation ``name`` if the run has trained further since."""
    step = run.evaluations.get(name, {}).get("step")
    last = run.column("step")[-1:]
    return f"of step {format_value(step)}" if is_number(step) and last > [step] else ""
