"""``python -m pospre.loader_report RECIPE [key=value …]``: what loading costs, and why."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pospre.command_line import recipe_parser
from pospre.errors import UserError, run_command
from pospre.output import check_output, check_picture, write_output
from pospre.recipe.recipe import load_recipe

_EPILOG = """\
examples:
  python -m pospre.loader_report yamls/demo/droppos.yaml data.path=photos
  python -m pospre.loader_report yamls/pretrain/intertwined_vitb16.yaml data.path=in1k.beton \\
      --feed 4000 --output costs.json --plot costs.png

Some images are loaded three times: by the recipe's threads for a consumer that costs nothing; by
these threads for a consumer that copies and augments, and with --feed takes as long as such a
trainer (wait is what it waits for images); and by one core that does everything, each stage timed:
reading, decoding, cutting and resizing, drawing places (plan), copying to the device and changing
pixels there (augment; on the CPU with one thread). Remote data are loaded once more before, which
downloads what is needed.

exit codes: 0 done, 2 a mistake in the recipe or the data (said in one message).
"""


def _parser() -> argparse.ArgumentParser:
    parser = recipe_parser(
        "pospre.loader_report",
        "Where the loader's time goes for a recipe, what it takes to feed a trainer, and what "
        "would make it cheaper.",
        _EPILOG,
    )
    add = parser.add_argument
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
        if value is not None and not 1 <= value < float("inf"):
            raise UserError(f"--{name} is {value}; give a number from 1 on.")
    check_output("--output", arguments.output)
    check_picture("--plot", arguments.plot)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from pospre.loader_costs.advice import advise
    from pospre.loader_costs.measure import measure
    from pospre.loader_costs.table import as_json, draw, table

    costs = measure(recipe, arguments.images, arguments.feed)
    costs.advice = advise(costs)
    print(table(costs))
    if arguments.output:
        write_output(arguments.output, as_json(costs))
    if arguments.plot:
        draw(costs, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
