"""Convert a data set on a Dask cluster, or on this machine's cores through Dask."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

# what takes seconds to import is imported where it is used: --help answers at once
from data_prep.convert import finish, make_parser, settings_of
from data_prep.distribute.tally import Settings, Tally
from pospre.data.cores import available_cores
from pospre.errors import UserError, run_command

if TYPE_CHECKING:
    from distributed import Client

    from data_prep.distribute.blocks import Share

_EPILOG = """\
examples:
  python -m data_prep.engine photos photos_mds --format mds --workers 4
  python -m data_prep.engine /shared/photos s3://bucket/photos --format mds \\
      --scheduler tcp://head:8786

The parts of data_prep.convert (--part k/n) become tasks of Dask; a task that fails, or whose worker
dies, is tried again elsewhere and goes on from its finished blocks; then the parts are merged. The
result has the same bytes as that of data_prep.convert. On a cluster every worker must see SRC and
DST under the same names (a shared disk, or DST in a bucket) and run in an environment and folder
where `import data_prep` works:
  dask scheduler
  dask worker tcp://head:8786 --nthreads 1 --nworkers 16

Dask is optional: pip install dask distributed

kinds of sources:
"""

_RETRIES = 3
_TASKS_PER_WORKER = 4  # so that a slow machine holds nobody up
_PATIENCE = 20  # seconds for a scheduler to answer


def run_parts(
    source: Path,
    destination: str,
    settings: Settings,
    *,
    scheduler: str | None,
    num_workers: int,
    num_parts: int | None = None,
    strict: bool = False,
) -> Tally | None:
    """Convert a data set in parts on a cluster, and merge them.

    Args:
        source: folder or archive.
        destination: of the data set.
        settings: what decides the bytes of the result.
        scheduler: address of the cluster; None starts one on this machine.
        num_workers: processes, if it is started here.
        num_parts: tasks; by default four for each worker.
        strict: whether to stop at what cannot be read.

    Raises:
        UserError: Dask is missing, the cluster does not answer, or a part fails again and again.
    """
    from data_prep.distribute.blocks import Share
    from data_prep.distribute.conversion import count_blocks, merge
    from data_prep.publish.publishing import open_target

    start = time.monotonic()
    num_blocks = count_blocks(source, settings)
    open_target(destination, settings.format)
    with ExitStack() as stack:
        client = _connect(scheduler, num_workers, stack)
        wanted = _TASKS_PER_WORKER * max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
        count = min(num_parts or wanted, num_blocks)
        shares = [Share(number, count) for number in range(1, count + 1)]
        tasks = {
            client.submit(
                _convert_part,
                (str(source.absolute()), _absolute(destination), settings, share, strict),
                retries=_RETRIES,
                pure=False,
            ): share
            for share in shares
        }
        already_there = _wait_for(tasks)
    tally = None if already_there else merge(destination)
    if tally is not None:
        tally.seconds = time.monotonic() - start
    return tally


def _convert_part(task: "tuple[str, str, Settings, Share, bool]") -> bool:
    """Convert one share on a worker; tell whether the whole data set is there already."""
    from data_prep.distribute.conversion import convert

    source, destination, settings, share, strict = task
    tally = convert(Path(source), destination, settings, num_workers=1, strict=strict, share=share)
    return tally is None


def _absolute(destination: str) -> str:
    return destination if "://" in destination else str(Path(destination).absolute())


def _connect(scheduler: str | None, num_workers: int, stack: ExitStack) -> "Client":
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise UserError(
            f"Dask cannot be loaded ({error}); pip install dask distributed, or use --part k/n of "
            "data_prep.convert."
        ) from error
    where: Any = scheduler
    if scheduler is None:
        where = stack.enter_context(
            LocalCluster(n_workers=num_workers, threads_per_worker=1, dashboard_address=None)
        )
    try:
        return stack.enter_context(Client(where, timeout=_PATIENCE))
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {scheduler} ({error}); write --scheduler tcp://host:8786"
        ) from error


def _wait_for(tasks: "dict[Any, Share]") -> bool:
    from distributed import as_completed

    bar = tqdm(total=len(tasks), unit="part", desc="convert", disable=None)
    results = []
    with bar:
        for task in as_completed(tasks):
            error = task.exception()
            if error is not None:
                share = tasks[task]
                raise UserError(
                    f"part {share.number}/{share.total} failed {_RETRIES + 1} times: {error} "
                    "Finished blocks are kept; the same command goes on from there."
                ) from error
            results.append(task.result())
            bar.update()
    return all(results)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = make_parser(prog="python -m data_prep.engine", description=__doc__, epilog=_EPILOG)
    add = parser.add_argument
    add("--scheduler", metavar="ADDRESS", help="of a running cluster (else one is started here)")
    add("--workers", type=int, default=available_cores(), help="processes, if started here (cores)")
    add("--parts", type=int, help="tasks (four for each worker)")
    args = parser.parse_args(argv)
    if args.statistics is not None:
        from data_prep.statistics import check_picture

        check_picture(args.statistics)
    settings = settings_of(args)
    for name, value in (("--workers", args.workers), ("--parts", args.parts)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} is out of range; it must be at least 1.")
    tally = run_parts(
        args.source,
        args.destination,
        settings,
        scheduler=args.scheduler,
        num_workers=args.workers,
        num_parts=args.parts,
        strict=args.strict,
    )
    finish(args.destination, tally, args)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
