"""The work of a worker: convert one block into its shard."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data_prep.distribute.activity import at
from data_prep.encode.images import PreparedImage, prepare_image
from data_prep.files.archives import DamagedItem
from data_prep.plan.plan import Block
from data_prep.plan.records import Moments, Record, Settings
from data_prep.publish.destination import Destination
from data_prep.sources.source import Item, Source, read_item
from pospre.data.decode.decoder import decode_image
from pospre.data.stores.description import checksum
from pospre.errors import UserError

if TYPE_CHECKING:
    from data_prep.encode.clips import PreparedClip

_LARGEST_SAMPLE = 1 << 30  # bytes: FFCV writes a page at once, and Linux fewer than 2 GiB


@dataclass(frozen=True)
class Job:
    """Common data of all blocks, sent to the workers."""

    source: Source  # without its items
    settings: Settings
    destination: Destination
    num_shares: int = 1  # of the conversion
    strict: bool = False  # whether to stop at unreadable files


def convert_block(task: tuple[Block, tuple[Item, ...]], job: Job) -> Record:
    """Convert the items of a block; return its record.

    ``UserError`` if a disk or network fails, or with ``strict`` an item cannot be read; ``OSError``
    if the block cannot be written.
    """
    from data_prep.publish.shards import block_writer  # Streaming: seconds to import

    block, items = task
    record = Record(block.number, block.key, job.num_shares)
    moments = _moments(job.settings)
    columns, num_bytes = job.settings.columns, sum(item.size for item in items)
    with job.destination.scratch() as folder:
        with block_writer(folder, columns, num_bytes, record) as write:
            for item in items:
                with at(str(job.source.root / item.name)):
                    try:
                        main = _prepare(item, job)
                    except DamagedItem as error:
                        _skip(item, str(error), record, job)
                        continue
                write(item, _note(item, main, record))
                if moments is not None:
                    moments.add(_rows(main, job.settings))
        if moments is not None:
            record.sums = moments.sums()
        job.destination.keep(folder, record)
    return record


def _prepare(item: Item, job: Job) -> "PreparedImage | PreparedClip":
    """Return the prepared item; ``DamagedItem`` if it cannot be used."""
    data = read_item(job.source, item)
    main: PreparedImage | PreparedClip
    if job.settings.frames is None:
        main = prepare_image(
            data,
            job.settings.max_side,
            job.settings.quality,
            check=job.settings.check,
            seekable=job.settings.seekable,
            decoding=job.settings.decoding,
        )
    else:
        from data_prep.encode.clips import prepare_clip  # scipy: slow to import

        main = prepare_clip(data, job.settings.frames)
    if main.num_bytes > _LARGEST_SAMPLE:
        raise DamagedItem(
            f"as a JPEG it takes {main.num_bytes} bytes, but at most {_LARGEST_SAMPLE} fit; "
            "--max-side makes it smaller"
        )
    return main


def _skip(item: Item, why: str, record: Record, job: Job) -> None:
    if job.strict:
        raise UserError(
            f"{job.source.root / item.name} cannot be read: {why}. Repair or remove it; without "
            "--strict such files are listed and left out."
        )
    record.skipped.append({"path": item.name, "reason": why})


def _note(item: Item, main: "PreparedImage | PreparedClip", record: Record) -> dict[str, Any]:
    """Add a sample to the record; return its column, besides label and path."""
    column: dict[str, Any]
    if isinstance(main, PreparedImage):
        record.num_visible += main.kept
        record.num_marked += main.marked
        record.sides.append((main.width, main.height))
        if main.deep is not None:
            deep = (len(record.labels), str(main.deep), main.deep.guessed, main.is_flat)
            record.deep.append(deep)
        column = {"image": main.jpeg}
    else:
        record.seconds.append(main.seconds)
        column = {"features": main.features}
    record.labels.append(item.label)
    record.num_bytes.append(main.num_bytes)
    record.crc32c.extend(checksum(data, item.label) for data in column.values())
    return column


def _moments(settings: Settings) -> Moments | None:
    """Return a counter for numbers that are normalised by the data set's own mean and std."""
    if settings.frames is not None:
        from data_prep.encode.clips import NUM_COEFFICIENTS

        return Moments(NUM_COEFFICIENTS)
    return Moments(settings.channels) if settings.channels != 3 else None


def _rows(main: "PreparedImage | PreparedClip", settings: Settings) -> np.ndarray:
    """Return the frames of a clip, or the pixels of an image as read later, from 0 to 1."""
    if not isinstance(main, PreparedImage):
        return main.features
    stored = torch.frombuffer(bytearray(main.jpeg), dtype=torch.uint8)
    return decode_image(stored, settings.decoding).reshape(-1, settings.channels) / 255
