"""Convert a data set on a Dask cluster: ``data_prep.convert --scheduler`` under its other name."""

import argparse
import sys

from data_prep import convert
from pospre.errors import run_command

_EPILOG = """\
examples:
  python -m data_prep.engine photos photos_mds --format mds --workers 4
  python -m data_prep.engine photos photos_mds --format mds --scheduler tcp://head:8786

All other options are those of data_prep.convert, whose --help explains clusters too.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.engine",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--scheduler", metavar="ADDRESS", default="local", help=convert.SCHEDULER)
    parser.add_argument("--parts", type=int, help="needed no longer: each block is a task")
    args, others = parser.parse_known_args(argv)
    return convert.main([*others, "--scheduler", args.scheduler])


if __name__ == "__main__":
    sys.exit(run_command(main))
