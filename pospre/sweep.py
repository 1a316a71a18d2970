"""``python -m pospre.sweep RECIPE key=value,value …``: a grid of runs, and its results."""

import json
import shlex
import signal
import subprocess
import sys

from pospre.command_line import LocalPath, recipe_parser
from pospre.errors import UserError, run_command
from pospre.output import check_output, write_output
from pospre.recipe.files import find_recipe
from pospre.trust import trust_classes

_EPILOG = """\
examples:
  python -m pospre.sweep yamls/finetune/lut_vitb16.yaml data.path=inat18/train \\
      evaluation.accuracy.data=inat18/val algorithms.supervised.num_classes=8142 \\
      optimizer.base_lr=1e-4,2.5e-4,5e-4 optimizer.weight_decay=0.05,0.1
  python -m pospre.sweep yamls/finetune/mae_vitb16.yaml seed=0,1,2 optimizer.base_lr=5e-4,1e-3 \\
      --launcher "composer -n 8"

pospre.train trains every combination in its own run folder, named after the recipe and the values.
Run the same command again to resume: finished runs are not repeated, and a stopped run continues.
The tables have the figures of the recipe's evaluations, and the best, mean and standard deviation
over the grid; with several seeds also mean and deviation of each setting of the other keys.

exit codes: 0 done; 2 a mistake in the recipe, the data or the values, before the first run;
otherwise that of the run that failed. 75 or 130: the run has saved, and the same command resumes.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Train every combination of some values of a recipe, and compare the figures."
    parser = recipe_parser("pospre.sweep", description, _EPILOG)
    parser.add_argument("--launcher", default="", metavar="COMMAND", help='such as "composer -n 8"')
    parser.add_argument(
        "--output", action=LocalPath, metavar="FILE.json", help="where to write the figures"
    )
    arguments = parser.parse_intermixed_args(argv)
    check_output("--output", arguments.output)
    launcher = _split(arguments.launcher) or [sys.executable]
    find_recipe(arguments.recipe)
    # late imports, so that --help and mistyped names are fast
    from tqdm import tqdm

    from pospre.evaluation.sweep_runs import cells_of, check_cells, summarise, table

    cells = cells_of(arguments.recipe, arguments.overrides)
    for cell in cells:
        trust_classes(cell.recipe.class_names)
    check_cells(cells)
    for cell in tqdm(cells, desc="sweep", unit="run"):
        if cell.is_done:
            continue
        command = [*launcher, "-m", "pospre.train", arguments.recipe, *cell.overrides]
        print(f"\n+ {shlex.join(command)}", file=sys.stderr, flush=True)
        code = _run(command)
        if code:
            print(f"sweep: {cell.recipe.run_name} ended with exit code {code}", file=sys.stderr)
            return code
    summary = summarise(cells)
    print(table(summary))
    if arguments.output is not None:
        write_output(arguments.output, json.dumps(summary, indent=2) + "\n")
    return 0


def _split(launcher: str) -> list[str]:
    try:
        return shlex.split(launcher)
    except ValueError as error:
        raise UserError(f"--launcher is {launcher}, not a valid command: {error}.") from error


def _run(command: list[str]) -> int:
    """Run a training and return its exit code; a signal to this process stops and saves it."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise UserError(f"--launcher: {command[0]} cannot be run ({error.strerror}).") from error
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # the run gets the signal as well
    return process.wait()


if __name__ == "__main__":
    sys.exit(run_command(main))
