"""One block → its shard or piece: read, prepare, write, hand over. This is what a worker does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from crc32c import crc32c

from data_prep.distribute.blocks import Block
from data_prep.distribute.store import Store
from data_prep.distribute.tally import Record, Settings
from data_prep.distribute.watching import at
from data_prep.encode.images import PreparedImage, Unreadable, prepare_image
from data_prep.encode.moments import Moments
from data_prep.encode.stderr import captured_stderr
from data_prep.files.reading import read_annotation, read_item
from data_prep.sources.source import Item, Source
from pospre.data.decode.decoder import decode_image
from pospre.errors import UserError

if TYPE_CHECKING:
    from data_prep.speech.features import PreparedClip

_MOST_SAID = 3  # lines of libraries that are kept with the reason


@dataclass(frozen=True)
class Job:
    """What is the same for all blocks; it travels to the workers.

    Attributes:
        source: without its items.
        settings: of the conversion.
        limit: largest shard in bytes, or size of a page.
        store: what takes the finished blocks.
        num_shares: that the conversion is divided into.
        strict: whether to stop at what cannot be read.
    """

    source: Source
    settings: Settings
    limit: int
    store: Store
    num_shares: int = 1
    strict: bool = False


def convert_block(task: tuple[Block, tuple[Item, ...]], job: Job) -> Record:
    """Convert the items of a block; return its record.

    Raises:
        UserError: with ``strict`` an item cannot be read, or a disk or network fails.
        OSError: the block cannot be written.
    """
    block, items = task
    record = Record(block.number, block.key, job.num_shares)
    moments = _moments(job.settings)
    with job.store.scratch() as folder:
        with _writing(_make_writer(folder, job), record) as writer:
            for item in items:
                with at(str(job.source.root / item.name)):
                    prepared = _prepare(item, job, writer.max_bytes)
                if isinstance(prepared, Unreadable):
                    _skip(item, prepared, record, job)
                else:
                    writer.write(item, _sample(prepared))
                    _note(item, prepared, record)
                    if moments is not None:
                        moments.add(_rows(prepared.main, job.settings))
        if moments is not None:
            record.sums = moments.sums()
        job.store.keep(folder, record)
    return record


@dataclass(frozen=True)
class _Prepared:
    main: "PreparedImage | PreparedClip"
    annotation: bytes | None


def _prepare(item: Item, job: Job, max_bytes: int) -> "_Prepared | Unreadable":
    data = read_item(job.source, item)
    if isinstance(data, Unreadable):
        return data
    settings = job.settings
    main: PreparedImage | PreparedClip | Unreadable
    if settings.frames is None:
        main = _prepare_image(data, item, settings)
    else:
        from data_prep.speech.features import prepare_clip  # torchaudio: seconds to import

        main = prepare_clip(data, settings.frames)
    if isinstance(main, Unreadable):
        return main
    annotation = None
    if job.source.annotation is not None:
        image = main if isinstance(main, PreparedImage) else None
        found = read_annotation(job.source, item, image)
        if isinstance(found, Unreadable):
            return found
        annotation = found
    num_bytes = main.num_bytes + len(annotation or b"")
    if num_bytes > max_bytes:
        return Unreadable(
            f"as a JPEG it takes {num_bytes} bytes, but at most {max_bytes} fit; --max-side makes "
            "it smaller"
        )
    return _Prepared(main, annotation)


def _prepare_image(data: bytes, item: Item, settings: Settings) -> PreparedImage | Unreadable:
    """Prepare an image; what the libraries say of it goes with its name."""
    with captured_stderr() as said:
        found = prepare_image(
            data,
            settings.max_side,
            settings.quality,
            check=settings.check,
            seekable=settings.seekable,
            decoding=settings.decoding,
        )
    if isinstance(found, Unreadable):
        return Unreadable("; ".join([found.reason, *said[:_MOST_SAID]]))
    for line in said:
        print(f"{item.name}: {line}", file=sys.stderr)
    return found


def _sample(prepared: _Prepared) -> dict[str, Any]:
    main = prepared.main
    sample: dict[str, Any] = (
        {"image": main.jpeg} if isinstance(main, PreparedImage) else {"features": main.features}
    )
    return sample if prepared.annotation is None else {**sample, "annotation": prepared.annotation}


def _skip(item: Item, why: Unreadable, record: Record, job: Job) -> None:
    if job.strict:
        raise UserError(
            f"{job.source.root / item.name} cannot be read: {why.reason}. Mend or remove it; "
            "without --strict such files are listed and left out."
        )
    record.skipped.append({"path": item.name, "reason": why.reason})


def _note(item: Item, prepared: _Prepared, record: Record) -> None:
    main = prepared.main
    number = len(record.labels)
    record.labels.append(item.label)
    record.num_bytes.append(main.num_bytes)
    stored: Any = main.jpeg if isinstance(main, PreparedImage) else main.features
    record.crc32c.append(crc32c(stored))
    if prepared.annotation is not None:
        record.extra_bytes.append(len(prepared.annotation))
    if isinstance(main, PreparedImage):
        record.num_kept += main.kept
        record.num_marked += main.marked
        record.sides.append((main.width, main.height))
        if main.deep is not None:
            record.deep.append((number, str(main.deep), main.deep.guessed, main.is_flat))
        return
    record.seconds.append(main.seconds)


def _moments(settings: Settings) -> Moments | None:
    """Return what counts the numbers that are normalised by the data set's own mean and std."""
    if settings.frames is not None:
        from data_prep.speech.features import NUM_COEFFICIENTS

        return Moments(NUM_COEFFICIENTS)
    return Moments(settings.channels) if settings.channels != 3 else None


def _rows(main: "PreparedImage | PreparedClip", settings: Settings) -> np.ndarray:
    """Return the frames of a clip, or the pixels of an image as they will be read, from 0 to 1."""
    if not isinstance(main, PreparedImage):
        return main.features
    stored = torch.frombuffer(bytearray(main.jpeg), dtype=torch.uint8)
    return decode_image(stored, settings.decoding).reshape(-1, settings.channels) / 255


def _make_writer(folder: Path, job: Job) -> Any:
    # The libraries are heavy: only the wanted one is loaded, and before the workers start.
    if job.settings.format == "ffcv":
        from data_prep.publish.writers import ffcv

        return ffcv.BlockWriter(folder, job.limit)
    from data_prep.publish.writers import mds

    columns = {"image": "bytes"}
    if job.settings.frames is not None:
        from data_prep.speech.features import NUM_COEFFICIENTS

        columns = {"features": f"ndarray:float32:{job.settings.frames},{NUM_COEFFICIENTS}"}
    if job.source.annotation is not None:
        columns["annotation"] = "bytes"
    return mds.BlockWriter(folder, columns, job.limit)


@contextmanager
def _writing(writer: Any, record: Record) -> Iterator[Any]:
    try:
        yield writer
        writer.finish(record)
    except BaseException:
        writer.abort()
        raise
