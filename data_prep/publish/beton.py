"""A .beton file in FFCV's format, made from the shards of all blocks.

FFCV's own allocator and field types lay it out, but in this process, and the images are stored as
they are. Stock FFCV always encodes them again, in worker processes: the order of pages depends on
which worker is faster, and if one fails (a full disk), the parent waits forever.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.memory_allocator import MemoryAllocator
from ffcv.writer import MIN_PAGE_SIZE, DatasetWriter, handle_sample
from streaming.base.format import reader_from_json

from data_prep.plan.records import Record
from data_prep.publish.description import sha256
from pospre.errors import UserError

_STOCK_PAGE_SIZE = 4 * MIN_PAGE_SIZE
_MANY_BYTES = 1 << 27

_Image = tuple[bytes, int, int]  # the file, width and height in pixels


def write_beton(target: Path, folder: Path, records: Sequence[Record]) -> None:
    """Join the samples of the shards in ``folder`` in one file."""
    fields: dict[str, Any] = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    fields["image"].encode = _store
    writer = DatasetWriter(str(target), fields, page_size_of(records), num_workers=1)
    writer.num_samples = sum(len(record.labels) for record in records)
    writer.prepare()
    writer.metadata_sm.close()
    writer.metadata_sm.unlink()  # a container may have too little shared memory
    metadata = np.zeros(writer.num_samples, writer.metadata_type)
    allocator = MemoryAllocator(str(target), writer.data_region_start, writer.page_size)
    samples = (sample for record in records for sample in _samples(folder, record))
    with allocator:
        for number, sample in enumerate(samples):
            handle_sample(sample, number, metadata.dtype.names, metadata, allocator, fields)
    writer.metadata_sm = SimpleNamespace(buf=metadata.tobytes())
    writer.finalize(allocator.allocations)
    if writer.header["alloc_table_ptr"] % writer.page_size:
        raise OSError(f"only a part of a page of {target.name} could be written")


def _store(destination: np.ndarray, image: _Image, malloc: Callable[[int], Any]) -> None:
    """Store an image, in place of ``RGBImageField.encode``."""
    data, destination["width"], destination["height"] = image
    destination["mode"] = IMAGE_MODES["jpg"]
    destination["data_ptr"], storage = malloc(len(data))
    storage[:] = np.frombuffer(data, np.uint8)


def _samples(folder: Path, record: Record) -> Iterator[tuple[_Image, int]]:
    """Yield image and label of every sample of a block; refuse a changed shard."""
    sides = iter(record.sides)
    for (name, _, digest), shard in zip(record.files, record.shards, strict=True):
        if sha256(folder / name) != digest:
            raise UserError(
                f"{folder / name} has changed since it was written; remove it and convert again."
            )
        reader = reader_from_json(str(folder), "", shard)
        for sample in (reader[index] for index in range(len(reader))):
            yield (sample["image"], *next(sides)), sample["label"]


def page_size_of(records: Sequence[Record]) -> int:
    """Return the size of a page: FFCV's smallest or usual one, or one that fits all images."""
    sizes = [size for record in records for size in record.num_bytes]
    usual = _STOCK_PAGE_SIZE if sum(sizes) > _MANY_BYTES else MIN_PAGE_SIZE
    return max(usual, 1 << (max(sizes) - 1).bit_length())
