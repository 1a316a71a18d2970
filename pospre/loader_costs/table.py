"""What loading costs, for people: a table with notes and advice, and a picture."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from pospre.loader_costs.advice import gigabytes
from pospre.loader_costs.costs import LoaderCosts, StageTimes
from pospre.output import save_picture
from pospre.text_table import format_table

_RATES = (1000.0, 4000.0, 16000.0)


def as_json(costs: LoaderCosts) -> str:
    """Return the costs as JSON."""
    derived = {name: getattr(costs, name) for name in ("per_core", "scaling", "bytes_per_epoch")}
    return json.dumps({**asdict(costs), **derived}, indent=1) + "\n"


def table(costs: LoaderCosts) -> str:
    """Return the costs as text."""
    title = (
        f"{costs.path} ({costs.format}, {costs.samples} samples): {costs.views} views an image; "
        f"{costs.alone.images} images in batches of {costs.batch}"
    )
    first = [
        stage for stage in costs.alone.stages if stage not in (*costs.consumer.stages, "other")
    ]
    names = [*first, *costs.consumer.stages, "other"]
    rows = [(name, *_cells(costs.alone, name), *_cells(costs.consumer, name)) for name in names]
    rows.append(("together", *_cells(costs.alone, None), *_cells(costs.consumer, None)))
    header = ("µs an image", "one core", "share", _threads(costs.workers), "share")
    advice = [textwrap.fill(f"- {line}", 100, subsequent_indent="  ") for line in costs.advice]
    return format_table(title, header, rows, ["", *_notes(costs), "", *advice])


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number or 'no'} threads"


def _cells(timing: StageTimes, stage: str | None) -> tuple[str, str]:
    """Return the time of an image and the share of a stage, or of all."""
    seconds = timing.seconds if stage is None else timing.stages.get(stage)
    if seconds is None:
        return "", ""
    return f"{1e6 * seconds / timing.images:.0f}", f"{100 * seconds / timing.seconds:.1f} %"


def _notes(costs: LoaderCosts) -> list[str]:
    rates = _RATES if costs.feed is None else (costs.feed,)
    cores = ", ".join(f"{costs.cores_for(rate):.1f} for {rate:.0f} images/s" for rate in rates)
    augment = f"on {costs.device}"
    if costs.device == "cpu":
        augment += f", {_threads(costs.augment_threads)}, at the expense of loading"
    pairs = [
        (
            "one core loads",
            f"{costs.per_core:.0f} images/s, {costs.per_core * costs.views:.0f} views",
        ),
        (
            f"{_threads(costs.workers)} load" + ("s" if costs.workers == 1 else ""),
            f"{costs.loaded_per_s:.0f} images/s; each of "
            f"{max(1, min(costs.workers, costs.cores))} cores {costs.scaling:.0%} of one alone",
        ),
        ("cores needed", cores),
        ("augment", augment),
        ("bytes", f"{costs.bytes_per_image / 1e3:.1f} kB an image, "
         f"{gigabytes(costs.bytes_per_epoch)} an epoch"),
    ]  # fmt: skip
    if costs.feed is not None:
        reached = min(1.0, costs.loaded_per_s / costs.feed)
        pairs.append(("feed", f"these threads load {reached:.0%} of {costs.feed:.0f} images/s"))
    pairs += _egress(costs)
    if costs.left_out:
        pairs.append(("left out", f"{costs.left_out} bad samples"))
    if costs.sizes is not None and costs.sizes.unreadable:
        pairs.append(
            ("unreadable", f"{costs.sizes.unreadable} of {costs.sizes.looked_at} samples looked at")
        )
    return [f"{name:<20}{text}" for name, text in pairs]


def _egress(costs: LoaderCosts) -> list[tuple[str, str]]:
    remote = costs.remote
    if remote is None:
        return []
    size = gigabytes(remote.num_bytes)
    here, each = " (this recipe)", "each machine"
    if costs.lanes > 1:
        each += f" (1/K of it on K machines, if K divides data.lanes = {costs.lanes})"
    return [
        (
            "egress",
            f"{size} for {each} in the first epoch, 0 in every other, with data.cache_limit "
            f"from {gigabytes(remote.unpacked_bytes)}{here if remote.cache_suffices else ''}",
        ),
        (
            "",
            f"up to {size} for each machine and epoch with a smaller cache"
            f"{'' if remote.cache_suffices else here}",
        ),
        (
            "downloaded",
            f"{gigabytes(remote.downloaded)} while measuring; {remote.fetched_per_s:.0f} images/s "
            "at the first visit",
        ),
    ]


def draw(costs: LoaderCosts, path: Path) -> None:
    """Draw the stages as two stacked bars.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing may open a window
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axis = figure.subplots()
    bars = {"one core": costs.alone, f"{_threads(costs.workers)} and the consumer": costs.consumer}
    names = list(dict.fromkeys([*costs.alone.stages, *costs.consumer.stages]))
    for place, timing in enumerate(bars.values()):
        left = 0.0
        for stage, seconds in timing.stages.items():
            width = max(0.0, 1e3 * seconds / timing.images)
            axis.barh(place, width, left=left, color=f"C{names.index(stage)}")
            left += width
    handles = [Patch(color=f"C{number}", label=name) for number, name in enumerate(names)]
    figure.legend(handles=handles, ncols=len(names) // 2 + 1, loc="outside upper center")
    axis.set_yticks(range(len(bars)), list(bars))
    axis.invert_yaxis()
    axis.set_xlabel("ms an image")
    save_picture(figure, path, dpi=110)
