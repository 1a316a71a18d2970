"""From a source to a complete data set at its destination, or nothing.

A conversion is divided into blocks (``preparation``), which processes or a cluster convert
(``worker``). The destination (``publish``) keeps finished blocks, and makes the data set when all
are there. Parts on several machines, and runs after a kill, convert the missing blocks.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from data_prep.distribute.ordered_maps import cluster_map, ordered_map
from data_prep.distribute.preparation import check_writers, make_plan, prepare
from data_prep.distribute.worker import Job, convert_block
from data_prep.plan.plan import Block, Plan, Share, check_complete, check_samples
from data_prep.plan.records import Record, Settings, Summary
from data_prep.publish.atomic import writing
from data_prep.publish.description import describe
from data_prep.publish.destination import Destination
from data_prep.publish.local import LocalBeton, LocalShards
from data_prep.sources.source import Item
from pospre.errors import UserError
from pospre.object_store import check_writable, is_remote


def convert(
    source: Path,
    destination: str | Path,
    settings: Settings,
    *,
    num_workers: int,
    strict: bool = False,
    overwrite: bool = False,
    share: Share | None = None,
    scheduler: str | None = None,
) -> Summary | None:
    """Convert a data set (folder or archive), or one ``share`` of its blocks for ``merge``.

    The destination is a folder of shards, a ``.beton`` file or an ``s3://`` address of shards.
    ``settings`` determine all bytes of the result. ``num_workers`` processes convert the blocks, or
    the cluster of a Dask ``scheduler`` (see ``cluster_map``). ``strict`` stops at unreadable files,
    and ``overwrite`` replaces an existing data set.

    Returns:
        The summary; None if the destination already has this conversion.

    Raises:
        UserError: nothing to convert, the destination exists or cannot be written, a library is
            missing, or with ``strict`` a file cannot be read. The destination is then untouched.
    """
    if scheduler is not None:  # its workers may run in other folders
        source = source.absolute()
        if "://" not in str(destination):
            destination = Path(destination).absolute()
    target = open_destination(destination, settings.format)
    target.check_apart(source)
    listed, settings = prepare(source, settings)
    plan, blocks = make_plan(listed, settings)
    if not overwrite and target.is_complete(plan.made_from):
        return None
    if overwrite:
        target.check_replaceable()
    check_writers(settings.format)
    wanted = blocks if share is None else share.of(blocks)
    start = time.monotonic()
    with _beginning(target, plan, share, overwrite):
        job = Job(
            replace(listed, items=()),
            settings,
            target,
            num_shares=1 if share is None else share.total,
            strict=strict,
        )
        by = num_workers if scheduler is None else scheduler
        summary = _convert_blocks(listed.items, wanted, plan, job, by)
        if share is None:
            check_samples(summary.records, source)
            _publish(target, plan, summary.records, overwrite)
    summary.seconds = time.monotonic() - start
    return summary


def merge(destination: str | Path) -> Summary | None:
    """Make one data set from the parts written by ``convert``; None if it was already done.

    ``UserError`` if a part is missing or foreign, or another data set exists.
    """
    target = open_destination(destination, "ffcv" if str(destination).endswith(".beton") else "mds")
    plan = target.plan()
    if plan is None:
        if target.description() is not None:
            return None
        raise UserError(
            f"{target.partial} has no parts of {destination}; write them with --part k/n."
        )
    if target.is_complete(plan.made_from):
        return None
    check_writers(plan.format)
    start = time.monotonic()
    with writing(target), target.locked(shared=False):
        written = target.records()
        check_complete(written, plan, target.partial)
        records = [written[number] for number in range(plan.num_blocks)]
        check_samples(records, target.partial)
        _publish(target, plan, records, overwrite=False)
    seconds = time.monotonic() - start
    return Summary(records, describe(plan, records), len(records), seconds)


def _publish(target: Destination, plan: Plan, records: Sequence[Record], overwrite: bool) -> None:
    """Move the data set to its place, unless something appeared there meanwhile."""
    if not overwrite and target.is_complete(plan.made_from):
        target.discard()
    else:
        target.publish(plan, records)


@contextmanager
def _beginning(
    target: Destination, plan: Plan, share: Share | None, overwrite: bool
) -> Iterator[None]:
    """Begin or resume; on failure keep finished blocks, and remove what is not worth keeping."""
    with writing(target), target.locked(shared=share is not None):
        if share is None:  # otherwise other parts need the plan
            target.adopt(plan)
            before = target.plan()
            if overwrite and before is not None and before.key != plan.key:
                target.discard()
        try:
            target.begin(plan)
            yield
        except BaseException:
            if share is None:  # otherwise other parts may be working there
                _keep_or_discard(target, plan)
            raise


def _keep_or_discard(target: Destination, plan: Plan) -> None:
    try:
        before, records = target.plan(), target.records()
    except UserError:
        return  # unreachable: the original error is reported
    if before is not None and before.key != plan.key:
        return  # another conversion's
    if any(record.labels for record in records.values()):
        print(
            f"{len(records)} of {plan.num_blocks} blocks are finished and kept in "
            f"{target.partial}; run the same command to resume.",
            file=sys.stderr,
        )
    else:
        target.discard()


def _convert_blocks(
    items: Sequence[Item],
    blocks: Sequence[Block],
    plan: Plan,
    job: Job,
    by: int | str,
) -> Summary:
    """Convert blocks that no earlier run has finished, by so many processes or a Dask scheduler."""
    written = job.destination.records()
    missing = [block for block in blocks if block.number not in written]
    num_reused = len(blocks) - len(missing)
    if num_reused:
        print(f"{num_reused} of {len(blocks)} blocks were already finished; resuming.")
    tasks = [(block, items[block.start : block.stop]) for block in missing]
    work = partial(convert_block, job=job)
    results = (
        cluster_map(work, tasks, by)
        if isinstance(by, str)
        else ordered_map(work, tasks, min(by, len(tasks)))
    )
    total = sum(block.stop - block.start for block in blocks)
    before = total - sum(len(some) for _, some in tasks)
    unit = "clip" if job.source.is_audio else "img"
    bar = tqdm(total=total, initial=before, unit=unit, desc="convert", disable=None)
    with closing(results), closing(bar):
        for block, record in zip(missing, results, strict=True):
            written[block.number] = record
            bar.update(block.stop - block.start)
    records = [written[block.number] for block in blocks]
    return Summary(records, describe(plan, records), num_reused)


def open_destination(destination: str | Path, data_format: str) -> Destination:
    """Return the destination of this name; ``UserError`` if it does not fit the format."""
    name = str(destination)
    if is_remote(name):
        if data_format != "mds":
            raise UserError(f"{name}: only MDS shards can go to a bucket; use --format mds.")
        from data_prep.publish.bucket import BucketShards

        check_writable(name)  # reports wrong addresses at once, not after ten attempts
        return BucketShards(name)
    if "://" in name:
        raise UserError(f"{name} is not a supported address; give a path or s3://….")
    path = Path(destination)
    if not path.name:
        raise UserError(f"DST '{name}' has no name; give that of a file or folder to make.")
    is_beton = path.suffix == ".beton"
    if is_beton != (data_format == "ffcv"):
        remedy = "end in .beton" if data_format == "ffcv" else "be a folder, not a .beton"
        raise UserError(f"DST {path} must {remedy} for --format {data_format}.")
    if path.exists() and path.is_dir() == is_beton:
        kind = "folder" if is_beton else "file"
        raise UserError(f"DST {path} is a {kind}; choose another name.")
    return LocalBeton(path) if is_beton else LocalShards(path)
