"""``python -m pospre.compare RUN_A RUN_B …``: compare runs, or a run with a reference."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pospre.command_line import LocalPath, command_parser
from pospre.errors import UserError, run_command
from pospre.output import check_output, write_output

if TYPE_CHECKING:  # slow to import for --help
    from pospre.reporting.run import Run

_EPILOG = """\
examples:
  python -m pospre.compare runs/mae runs/droppos
  python -m pospre.compare runs/mae runs/mae_4x runs/mae_16x --output compare.html
  python -m pospre.compare runs/mae_s0 runs/mae_s1 runs/mae_s2 --write-reference mae.json
  python -m pospre.compare runs/mae_new --reference mae.json

Prints losses and metrics at the last step that all runs have logged, the figures of their
evaluations (evaluation/*.json) and the keys of the recipes that differ. Figures have standard
errors where the evaluation gives them. For two runs it prints the difference, and marks differences
of more than two standard errors. --output writes a page with the curves on common axes.

A reference is made from at least three runs that differ only in the seed. Its steps are cut into
five windows; each window has the deviation of each loss and metric between the seeds. A run with
one of these seeds must stay within half a deviation of that seed's own windows, because only
rounding may differ. A run with another seed must stay within five deviations of the mean.
tests/benchmarks/reference has references for the demos of MAE and DropPos.

exit codes: 0 done; 1 the run leaves the band of --reference; 2 a mistake in the command, a folder
that is not a run, or runs with nothing in common, with one message.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Compare runs: curves, figures and recipes."
    parser = command_parser("pospre.compare", description, _EPILOG)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of python -m pospre.train")
    parser.add_argument("--output", action=LocalPath, metavar="FILE", help="page to write, .html")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--reference", action=LocalPath, metavar="FILE", help="check the curves of one run"
    )
    group.add_argument(
        "--write-reference", action=LocalPath, metavar="FILE", help="make a reference from the runs"
    )
    given = parser.parse_args(argv)
    _check(given)
    # late imports, so that --help and mistyped options are fast
    from pospre.reporting.compare import read_runs

    runs = read_runs(given.runs)
    for line in (line for run in runs for line in run.left_out):
        print(f"left out: {line}", file=sys.stderr)
    if given.reference is not None:
        return _beside(runs[0], given.reference)
    if given.write_reference is not None:
        from pospre.reporting.reference_curves import make_reference, to_text

        write_output(given.write_reference, to_text(make_reference(runs)))
        print(given.write_reference)
        return 0
    from pospre.reporting.compare import compare_runs, comparison_page, comparison_text

    comparison = compare_runs(runs)
    print(comparison_text(comparison))
    if given.output is not None:
        write_output(given.output, comparison_page(comparison))
        print(f"\nwritten: {given.output}")
    return 0


def _beside(run: "Run", path: Path) -> int:
    """Print a run compared with a reference; return 1 if it leaves the band."""
    from pospre.reporting.reference_curves import check_run, read_reference, reference_text

    checks = check_run(run, read_reference(path))
    print(reference_text(checks, run.name))
    return 0 if all(check.is_inside for check in checks) else 1


def _check(given: argparse.Namespace) -> None:
    """Refuse invalid combinations before reading anything."""
    if given.reference is not None and len(given.runs) != 1:
        raise UserError(f"--reference is for one run; {len(given.runs)} are given.")
    single = given.reference is not None or given.write_reference is not None
    if not single and len(given.runs) == 1:
        raise UserError(
            f"{given.runs[0]} is one run; give another one to compare with, or --reference FILE."
        )
    if single and given.output is not None:
        raise UserError("--output is a page of several runs; leave it out here.")
    check_output("--output", given.output, ".html")
    check_output("--write-reference", given.write_reference)


if __name__ == "__main__":
    sys.exit(run_command(main))
