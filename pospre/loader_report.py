"""``python -m pospre.loader_report RECIPE [key=value …]``: what loading costs, and why."""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pospre.errors import UserError, needing, run_command
from pospre.recipe.recipe import load_recipe

if TYPE_CHECKING:
    from pospre.report.loader.table import LoaderBill, Timing

_EPILOG = """\
examples:
  python -m pospre.loader_report yamls/demo/droppos.yaml data.path=photos
  python -m pospre.loader_report yamls/pretrain/intertwined_vitb16.yaml data.path=in1k.beton \\
      --feed 4000 --output bill.json --plot bill.png

Some images are loaded three times: by the recipe's threads for a consumer that costs nothing; by
these threads for a consumer that copies and augments, and with --feed takes as long as such a
trainer (wait is what it waits for images); and by one core that does everything, each stage timed:
reading, decoding, cutting and resizing, drawing places (plan), copying to the device and changing
pixels there (augment; on the CPU with one thread). Remote data are loaded once more before, which
downloads what is needed.

exit codes: 0 done, 2 a mistake in the recipe or the data (said in one message).
"""
_PLOT_KINDS = (".png", ".pdf", ".svg")
_RATES = (1000.0, 4000.0, 16000.0)


def as_json(bill: "LoaderBill") -> str:
    """Return the bill as JSON."""
    derived = {name: getattr(bill, name) for name in ("per_core", "scaling", "bytes_per_epoch")}
    return json.dumps({**asdict(bill), **derived}, indent=1) + "\n"


def table(bill: "LoaderBill") -> str:
    """Return the bill as text."""
    from pospre.evaluation.table import format_table

    title = (
        f"{bill.path} ({bill.format}, {bill.samples} samples): {bill.views} views an image; "
        f"{bill.alone.images} images in batches of {bill.batch}"
    )
    first = [stage for stage in bill.alone.stages if stage not in (*bill.consumer.stages, "other")]
    names = [*first, *bill.consumer.stages, "other"]
    rows = [(name, *_cells(bill.alone, name), *_cells(bill.consumer, name)) for name in names]
    rows.append(("together", *_cells(bill.alone, None), *_cells(bill.consumer, None)))
    header = ("µs an image", "one core", "share", _threads(bill.workers), "share")
    return format_table(title, header, rows, ["", *_notes(bill), "", *_bullets(bill)])


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number or 'no'} threads"


def _cells(timing: "Timing", stage: str | None) -> tuple[str, str]:
    """Return the time of an image and the share of a stage, or of all."""
    seconds = timing.seconds if stage is None else timing.stages.get(stage)
    if seconds is None:
        return "", ""
    return f"{1e6 * seconds / timing.images:.0f}", f"{100 * seconds / timing.seconds:.1f} %"


def _notes(bill: "LoaderBill") -> list[str]:
    from pospre.report.loader.advice import gigabytes

    rates = _RATES if bill.feed is None else (bill.feed,)
    cores = ", ".join(f"{bill.cores_for(rate):.1f} for {rate:.0f} images/s" for rate in rates)
    augment = f"on {bill.device}"
    if bill.device == "cpu":
        augment += f", {_threads(bill.augment_threads)}, at the expense of loading"
    pairs = [
        ("one core loads", f"{bill.per_core:.0f} images/s, {bill.per_core * bill.views:.0f} views"),
        (
            f"{_threads(bill.workers)} load" + ("s" if bill.workers == 1 else ""),
            f"{bill.loaded_per_s:.0f} images/s; each of "
            f"{max(1, min(bill.workers, bill.cores))} cores {bill.scaling:.0%} of one alone",
        ),
        ("cores needed", cores),
        ("augment", augment),
        ("bytes", f"{bill.bytes_per_image / 1e3:.1f} kB an image, "
         f"{gigabytes(bill.bytes_per_epoch)} an epoch"),
    ]  # fmt: skip
    if bill.feed is not None:
        reached = min(1.0, bill.loaded_per_s / bill.feed)
        pairs.append(("feed", f"these threads load {reached:.0%} of {bill.feed:.0f} images/s"))
    pairs += _egress(bill)
    if bill.left_out:
        pairs.append(("left out", f"{bill.left_out} bad samples"))
    if bill.sizes is not None and bill.sizes.unreadable:
        pairs.append(
            ("unreadable", f"{bill.sizes.unreadable} of {bill.sizes.looked_at} samples looked at")
        )
    return [f"{name:<20}{text}" for name, text in pairs]


def _egress(bill: "LoaderBill") -> list[tuple[str, str]]:
    from pospre.report.loader.advice import gigabytes

    remote = bill.remote
    if remote is None:
        return []
    size = gigabytes(remote.num_bytes)
    here = " (this recipe)"
    return [
        (
            "egress",
            f"{size} for each machine in the first epoch, 0 in every other, with data.cache_limit "
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


def _bullets(bill: "LoaderBill") -> list[str]:
    return [textwrap.fill(f"- {line}", 100, subsequent_indent="  ") for line in bill.advice]


def draw(bill: "LoaderBill", path: Path) -> None:
    """Draw the stages as two stacked bars.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing may open a window
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axis = figure.subplots()
    bars = {"one core": bill.alone, f"{_threads(bill.workers)} and the consumer": bill.consumer}
    names = list(dict.fromkeys([*bill.alone.stages, *bill.consumer.stages]))
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
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def _check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        state = "is a folder" if path.is_dir() else f"cannot lie in {path.parent}: it is no folder"
        raise UserError(f"{option} {path} {state}; give a file in a folder that exists.")
    if option == "--plot" and path.suffix not in _PLOT_KINDS:
        raise UserError(f"--plot {path} must end in {', '.join(_PLOT_KINDS)}.")
    if option == "--plot":
        with needing("convert", f"--plot {path}"):
            import_module("matplotlib")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pospre.loader_report",
        description="Where the loader's time goes for a recipe, what it takes to feed a trainer, "
        "and what would make it cheaper.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", help="YAML file; see yamls/")
    add("overrides", nargs="*", metavar="key=value", help="changes of the recipe")
    add("--images", type=int, default=500, help="samples to time (500)")
    add("--feed", type=float, help="images/s that the GPUs of a machine take")
    add("--output", type=Path, metavar="FILE", help="where to write JSON")
    add("--plot", type=Path, metavar="FILE.png", help="where to draw the stages")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    for name in ("images", "feed"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} is {value}; give a number above 0.")
    for option in ("output", "plot"):
        _check_file(f"--{option}", getattr(arguments, option))
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from pospre.report.loader.advice import advise
    from pospre.report.loader.measure import measure

    bill = measure(recipe, arguments.images, arguments.feed)
    bill.advice = advise(bill)
    print(table(bill))
    if arguments.output:
        try:
            arguments.output.write_text(as_json(bill), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{arguments.output} cannot be written: {error.strerror}.") from error
    if arguments.plot:
        draw(bill, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
