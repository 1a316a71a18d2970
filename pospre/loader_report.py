"""``python -m pospre.loader_report RECIPE [key=value …]``: loading costs by stage."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pospre.command_line import LocalPath, add_trust, recipe_parser
from pospre.errors import UserError, run_command
from pospre.output import check_output, format_table, write_output
from pospre.recipe.recipe import load_recipe

if TYPE_CHECKING:  # slow to import for --help
    from pospre.loader_costs import LoaderCosts, StageTimes

_RATES = (1000.0, 4000.0, 16000.0)
_EPILOG = """\
examples:
  python -m pospre.loader_report yamls/demo/droppos.yaml data.path=photos
  python -m pospre.loader_report yamls/pretrain/intertwined_vitb16.yaml data.path=in1k.beton \\
      --feed 4000 --output costs.json

The command loads some images three times. First, the recipe's threads load for a consumer that
does nothing. Second, they load for a consumer that copies and augments; --feed makes it as slow as
a trainer, and "wait" is the time it waits for images. Third, one core does everything, and each
stage is timed: read, decode, crop and resize, draw the crops (plan), copy to the device, and change
pixels there (augment; on the CPU with one thread). Remote data are downloaded before that.

exit codes: 0 done; 2 a mistake in the recipe or the data, with one message.
"""


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "pospre.loader_report",
        "Time each stage of a recipe's loader, count the cores that feed a trainer, and hint at "
        "what would make loading cheaper.",
        _EPILOG,
    )
    add_trust(parser)
    add = parser.add_argument
    add("--images", type=int, default=500, help="samples to time (500)")
    add("--feed", type=float, help="images/s that the GPUs of a machine take")
    add("--output", action=LocalPath, metavar="FILE", help="JSON file to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    for name in ("images", "feed"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value < float("inf"):
            raise UserError(f"--{name} is {value}; give a number from 1 on.")
    check_output("--output", arguments.output)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from pospre.loader_costs import measure

    costs = measure(recipe, arguments.images, arguments.feed)
    print(_table(costs))
    if arguments.output:
        write_output(arguments.output, _as_json(costs))
    return 0


def _as_json(costs: "LoaderCosts") -> str:
    names = ("per_core", "scaling", "bytes_per_epoch", "hint")
    derived = {name: getattr(costs, name) for name in names}
    return json.dumps({**asdict(costs), **derived}, indent=1) + "\n"


def _table(costs: "LoaderCosts") -> str:
    title = (
        f"{costs.path} ({costs.format}, {costs.samples} samples): {costs.views} views an image; "
        f"{costs.alone.images} images in batches of {costs.batch}"
    )
    first = [name for name in costs.alone.stages if name not in (*costs.consumer.stages, "other")]
    names = [*first, *costs.consumer.stages, "other"]
    rows = [(name, *_cells(costs.alone, name), *_cells(costs.consumer, name)) for name in names]
    rows.append(("together", *_cells(costs.alone, None), *_cells(costs.consumer, None)))
    header = ("µs an image", "one core", "share", _threads(costs.workers), "share")
    notes = [
        textwrap.fill(f"{name:<20}{text}", 100, subsequent_indent=" " * 20)
        for name, text in _notes(costs)
    ]
    return format_table(title, header, rows, ["", *notes])


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number or 'no'} threads"


def _cells(timing: "StageTimes", stage: str | None) -> tuple[str, str]:
    """Return the time per image and the share of a stage, or of all stages."""
    seconds = timing.seconds if stage is None else timing.stages.get(stage)
    if seconds is None:
        return "", ""
    return f"{1e6 * seconds / timing.images:.0f}", f"{100 * seconds / timing.seconds:.1f} %"


def _gigabytes(num_bytes: float) -> str:
    digits = 1 if num_bytes >= 1e10 else 2 if num_bytes >= 1e8 else 4
    return f"{num_bytes / 1e9:.{digits}f} GB"


def _notes(costs: "LoaderCosts") -> Iterator[tuple[str, str]]:
    feed, workers, remote = costs.feed, _threads(costs.workers), costs.remote
    views = costs.per_core * costs.views
    yield "one core loads", f"{costs.per_core:.0f} images/s, {views:.0f} views"
    yield (
        f"{workers} load{'s' if costs.workers == 1 else ''}",
        f"{costs.loaded_per_s:.0f} images/s; each of {max(1, min(costs.workers, costs.cores))} "
        f"cores {costs.scaling:.0%} of one alone",
    )
    rates = _RATES if feed is None else (feed,)
    cores = ", ".join(f"{costs.cores_for(rate):.1f} for {rate:.0f} images/s" for rate in rates)
    yield "cores needed", cores
    on_cpu = f", {_threads(costs.augment_threads)}, at the expense of loading"
    yield "augment", f"on {costs.device}{on_cpu if costs.device == 'cpu' else ''}"
    epoch = _gigabytes(costs.bytes_per_epoch)
    yield "bytes", f"{costs.bytes_per_image / 1e3:.1f} kB an image, {epoch} an epoch"
    if feed is not None:
        reached = min(1.0, costs.loaded_per_s / feed)
        yield "feed", f"these threads load {reached:.0%} of {feed:.0f} images/s"
    if remote is not None:
        size, cached = _gigabytes(remote.num_bytes), _gigabytes(remote.unpacked_bytes)
        yield (
            "download",
            f"at most {size} for each machine: in the first epoch with data.cache_limit from "
            f"{cached}, in every epoch with a smaller one; {_gigabytes(remote.downloaded)} while "
            f"measuring; {remote.fetched_per_s:.0f} images/s at the first visit",
        )
    if costs.left_out:
        yield "left out", f"{costs.left_out} bad samples"
    yield "hint", costs.hint


if __name__ == "__main__":
    sys.exit(run_command(main))
