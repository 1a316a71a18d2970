"""``python -m pospre.report RUN_FOLDER`` writes the report page of a run."""

import sys

from pospre.command_line import command_parser
from pospre.errors import run_command

EXAMPLES = """examples:
  python -m pospre.report runs/droppos_vits16

The page RUN_FOLDER/report.html is one file and needs no network: mail it, or open it from disk. It
can be written during training, and again after every evaluation:
  python -m pospre.evaluate position_grid --model runs/droppos_vits16 --data DATA
"""


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, write the page and print its path."""
    description = (
        "Write one self-contained HTML page about a pre-training run: headline figures, curves, "
        "position accuracy, pictures, recipe and how to repeat it."
    )
    parser = command_parser("pospre.report", description, EXAMPLES)
    parser.add_argument(
        "run_folder",
        metavar="RUN_FOLDER",
        help="folder made by python -m pospre.train: recipe.yaml, metrics.jsonl, evaluation/",
    )
    folder = parser.parse_args(argv).run_folder
    # late imports, so that --help is fast
    from pospre.reporting.page import write_page
    from pospre.reporting.run import read_run

    run = read_run(folder)
    print(write_page(run))
    for line in run.left_out:
        print(f"left out: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
