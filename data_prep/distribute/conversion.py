"""From a source to a complete data set in its place, or to nothing.

A conversion is cut into blocks (``blocks``); workers convert them (``block_work``), a store keeps
the finished ones (``store``), and when all are there they become the data set (``publishing``).
Parts on several machines, and runs that follow a killed one, convert the blocks that are missing.
"""

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.distribute.blocks import Block, Share, cut_blocks
from data_prep.distribute.completeness import check_blocks, check_own, check_samples
from data_prep.distribute.locks import WHOLE
from data_prep.distribute.plan import Plan, difference
from data_prep.distribute.processes import ordered_map
from data_prep.distribute.store import Store
from data_prep.distribute.tally import Record, Settings, Tally
from data_prep.distribute.worker import Job, convert_block
from data_prep.publish.publishing import Target, open_target
from data_prep.sources.registry import open_source
from data_prep.sources.source import Source
from pospre.errors import UserError

_FRAMES = 100  # of a clip: one second, and 20 ms of silence

_MISSING_LIBRARY = {
    "ffcv": "FFCV cannot be loaded ({error}); install its libraries (Debian, Ubuntu: apt-get "
    "install pkg-config libopencv-dev libturbojpeg0-dev, then pospre[ffcv]), or use "
    "--format mds.",
    "mds": "Streaming cannot be loaded ({error}); install pospre[convert], or use --format ffcv.",
}


def convert(
    source: Path,
    destination: str | Path,
    settings: Settings,
    *,
    num_workers: int,
    strict: bool = False,
    overwrite: bool = False,
    share: Share | None = None,
) -> Tally | None:
    """Convert a data set, or one share of it that ``merge`` puts together with the others.

    Args:
        source: folder or archive.
        destination: folder of shards, ``.beton`` file or ``s3://`` address of shards.
        settings: what decides the bytes of the result.
        num_workers: processes.
        strict: whether to stop at what cannot be read.
        overwrite: whether to replace what is there.
        share: which blocks to convert; None for all of them.

    Returns:
        what was met; None when the destination already holds this very conversion.

    Raises:
        UserError: nothing to convert, the destination is taken or cannot be written, a library is
            missing, or with ``strict`` a file cannot be read. The destination is then untouched.
    """
    target = open_target(destination, settings.format)
    target.check_apart(source)
    listed, settings = _select(source, settings)
    made_from = {"settings": asdict(settings), "source": listed.fingerprint()}
    if not overwrite and target.is_complete(made_from):
        _tidy(target.store, made_from)
        return None
    if overwrite:
        target.check_replaceable()
    writers = _load_writers(settings.format)
    blocks = _cut(listed, settings)
    largest = max(sum(i.size for i in listed.items[b.start : b.stop]) for b in blocks)
    limit = _limit(writers, listed, largest)
    blocks = [block._replace(key=_key(block, listed, settings, limit)) for block in blocks]
    plan = Plan(
        made_from=made_from,
        num_blocks=len(blocks),
        num_items=len(listed.items),
        classes=listed.classes,
        num_ignored=listed.num_ignored,
        split_rule=listed.split_rule,
        annotation=listed.annotation,
        limit=limit,
        noun="WAV files" if listed.is_audio else "images",
        titles=listed.titles,
        annotation_classes=listed.annotation_classes,
        ignored=list(listed.ignored),
        block_keys=[block.key for block in blocks],
    )
    wanted = blocks if share is None else share.of(blocks)
    start = time.monotonic()
    with _beginning(target, plan, share, overwrite):
        job = Job(
            replace(listed, items=()),
            settings,
            plan.limit,
            target.store,
            num_shares=1 if share is None else share.total,
            strict=strict,
        )
        tally = _convert_blocks(listed, wanted, plan, job, num_workers)
        if share is None:
            check_samples(tally.records, plan, source)
            _publish(target, plan, tally.records, overwrite)
    tally.seconds = time.monotonic() - start
    tally.num_ignored, tally.ignored = plan.num_ignored, plan.ignored
    return tally


def merge(destination: str | Path) -> Tally | None:
    """Make one data set of the parts that ``convert`` has written; None if that was done before.

    Raises:
        UserError: a part is missing or foreign, or another data set is there.
    """
    target = open_target(destination, "ffcv" if str(destination).endswith(".beton") else "mds")
    plan = target.store.plan()
    if plan is None:
        if target.exists():
            return None
        raise UserError(
            f"{target.store.where} holds no parts of {destination}; write them with --part k/n."
        )
    if target.is_complete(plan.made_from):
        _tidy(target.store, plan.made_from)
        return None
    _load_writers(plan.format)
    start = time.monotonic()
    with _as_user_errors(target), target.store.alone(WHOLE):
        found = target.store.records()
        check_blocks(found, plan, target.store.where)
        records = [found[number] for number in range(plan.num_blocks)]
        check_samples(records, plan, target.store.where)
        _publish(target, plan, records, overwrite=False)
    seconds = time.monotonic() - start
    return Tally(records, plan.classes, len(records), seconds, plan.num_ignored, plan.ignored)


def _tidy(store: Store, made_from: dict[str, Any]) -> None:
    """Remove what parts that came late have left; nobody else's work, and only where that goes."""
    with suppress(UserError, OSError):
        if store.plan() is None:
            return
        with store.alone(WHOLE):
            before = store.plan()
            if before is not None and difference(before.made_from, made_from) is None:
                store.discard()


def _publish(target: Target, plan: Plan, records: Sequence[Record], overwrite: bool) -> None:
    """Put the data set in its place, unless something has come there in the meantime."""
    if not overwrite and target.is_complete(plan.made_from):
        target.store.discard()
    else:
        target.publish(plan, records)


def count_blocks(source: Path, settings: Settings) -> int:
    """Return in how many blocks a source is converted: the most parts that it can have."""
    listed, settings = _select(source, settings)
    return len(_cut(listed, settings))


def _cut(source: Source, settings: Settings) -> list[Block]:
    items = source.items
    return cut_blocks([item.name for item in items], [i.size for i in items], settings.shard_mb)


def _key(block: Block, source: Source, settings: Settings, limit: int) -> str:
    """Return a hash of everything that decides the bytes of a block."""
    parts = [asdict(settings), limit, source.fingerprint(block.start, block.stop)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _select(path: Path, settings: Settings) -> tuple[Source, Settings]:
    """List the source's wanted part; settings are those that matter for its kind."""
    source = open_source(
        path,
        kind=settings.source,
        split=settings.split,
        val_fraction=settings.val_fraction,
        seed=settings.seed,
        keywords=settings.keywords,
    )
    settings = replace(settings, source=source.kind)
    if not source.is_audio:
        for name, value in (("--frames", settings.frames), ("--keywords", settings.keywords)):
            if value is not None:
                raise UserError(
                    f"{name} {value} is for clips, but {path} is no folder of WAV files; leave it "
                    "out."
                )
        if settings.format != "mds" and settings.channels not in (1, 3):
            raise UserError(
                f"--channels {settings.channels}: a .beton holds JPEGs, of 3 channels or 1; use "
                "--format mds."
            )
        return source, settings
    for name, is_usual in (
        ("--channels", settings.channels == Settings.channels),
        ("--deep-range", settings.deep_range == Settings.deep_range),
    ):
        if not is_usual:
            raise UserError(f"{name} is for images, but {path} holds WAV files; leave it out.")
    if settings.seekable:
        raise UserError(f"--seekable is for JPEGs, but {path} holds WAV files.")
    if settings.format != "mds":
        raise UserError(f"{path} holds WAV files; their features are stored with --format mds.")
    return source, replace(settings, frames=settings.frames or _FRAMES)


def _load_writers(data_format: str) -> Any:
    """Import the writers of a format: the libraries are heavy, and FFCV's may be missing."""
    try:
        return importlib.import_module(f"data_prep.publish.writers.{data_format}")
    except ImportError as error:
        raise UserError(_MISSING_LIBRARY[data_format].format(error=error)) from error


def _limit(writers: Any, source: Source, largest_block: int) -> int:
    if hasattr(writers, "page_size"):
        return int(writers.page_size(source.items))
    return int(writers.size_limit(source.items, largest_block))


@contextmanager
def _beginning(target: Target, plan: Plan, share: Share | None, overwrite: bool) -> Iterator[None]:
    """Begin or go on; on failure keep what is finished, and remove what is not worth keeping.

    Raises:
        UserError: something else is there, or nothing can be written.
    """
    store = target.store
    name = WHOLE if share is None else f"part-{share.number}-of-{share.total}"
    with _as_user_errors(target), target.clean_parents(), store.alone(name):
        if share is None:  # else others count on the plan
            store.adopt(plan)
        if overwrite and share is None:
            before = store.plan()
            if before is not None and before.key != plan.key:
                store.discard()
        try:
            store.begin(plan)
            yield
        except BaseException:
            if share is None:  # else others may be at work there
                _keep_or_discard(store, plan)
            raise


def _keep_or_discard(store: Store, plan: Plan) -> None:
    try:
        before, records = store.plan(), store.records()
    except UserError:
        return  # out of reach: what went wrong before is the message
    if before is not None and before.key != plan.key:
        return  # another conversion's
    if any(record.labels for record in records.values()):
        print(
            f"{len(records)} of {plan.num_blocks} blocks are finished and kept in {store.where}; "
            "the same command goes on from there.",
            file=sys.stderr,
        )
    else:
        store.discard()


@contextmanager
def _as_user_errors(target: Target) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror or error}. Make room or choose another "
            "destination, then run the same command again."
        ) from error


def _convert_blocks(
    source: Source, blocks: Sequence[Block], plan: Plan, job: Job, num_workers: int
) -> Tally:
    """Convert the blocks that no earlier run has finished."""
    found = job.store.records()
    check_own(found, plan, job.store.where)
    reused = [block for block in blocks if block.number in found]
    missing = [block for block in blocks if block.number not in found]
    if reused:
        print(f"{len(reused)} of {len(blocks)} blocks were finished before; going on.")
    unit = "clip" if source.is_audio else "img"
    tasks = [(block, source.items[block.start : block.stop]) for block in missing]
    work: Callable[[Any], Record] = partial(convert_block, job=job)
    results = ordered_map(work, tasks, min(num_workers, len(tasks)))
    total = sum(block.stop - block.start for block in blocks)
    before = sum(block.stop - block.start for block in reused)
    bar = tqdm(total=total, initial=before, unit=unit, desc="convert", disable=None)
    # The disk works beside the processors: at the end there is little to wait for.
    with closing(results), closing(bar), ThreadPoolExecutor(1) as background:
        settled = []
        for block, record in zip(missing, results, strict=True):
            found[block.number] = record
            settled.append(background.submit(job.store.settle, record))
            bar.update(block.stop - block.start)
        for future in settled:
            future.result()
    return Tally([found[block.number] for block in blocks], source.classes, len(reused))
