"""A .beton file in FFCV's format, made from the shards of all blocks.

Stock FFCV encodes in worker processes. If one fails (an unreadable image, a full disk), the parent
waits forever and leaves a file without metadata. The order of pages depends on which worker is
faster, and RGBImageField always encodes again. Here the file is laid out from the sizes of the
prepared images, as FFCV's allocator would with one worker, using FFCV's own types.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.types import (
    ALLOC_TABLE_TYPE,
    CURRENT_VERSION,
    TYPE_ID_HANDLER,
    FieldDescType,
    HeaderType,
    get_metadata_type,
)
from ffcv.utils import align_to_page
from ffcv.writer import MIN_PAGE_SIZE

from data_prep.plan.records import Record
from data_prep.sources.source import Item
from pospre.data.stores.mds_index import ShardEntry
from pospre.errors import UserError

_STOCK_PAGE_SIZE = 4 * MIN_PAGE_SIZE
_MAX_PAGE_SIZE = 1 << 31
_MANY_BYTES = 1 << 27
_LONGEST_GROWN_JPEG = 1 << 26
_JPEG_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif")


def write_beton(
    target: Path, folder: Path, records: Sequence[Record], page_size: int
) -> tuple[int, str]:
    """Join the shards' samples; return the bytes and the SHA-256 of the file.

    The order of the sections is FFCV's: header, fields, metadata, pages, table of allocations.
    """
    fields: dict[str, Any] = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    head = _describe_fields(fields)
    images = np.concatenate([np.array(record.num_bytes, np.int64) for record in records])
    metadata = np.zeros(len(images), get_metadata_type(list(fields.values())))
    start = HeaderType.itemsize + head.nbytes + metadata.nbytes
    data_start = align_to_page(start, page_size)
    offsets, num_pages = _lay_out(images, page_size)
    pointers = data_start + offsets
    _fill(metadata, records, pointers)
    header = np.zeros(1, HeaderType)
    header["version"], header["num_fields"] = CURRENT_VERSION, len(fields)
    header["page_size"], header["num_samples"] = page_size, len(images)
    header["alloc_table_ptr"] = data_start + num_pages * page_size
    gaps = np.diff(offsets, prepend=0) - np.append(0, images[:-1])
    with target.open("wb") as file:
        output = _Hashed(file)
        for section in (header, head, metadata):
            output.write(section.tobytes())
        output.write(bytes(data_start - start))
        samples = itertools.chain.from_iterable(_samples(folder, record) for record in records)
        for gap, sample in zip(gaps.tolist(), samples, strict=True):
            output.write(bytes(gap))
            output.write(sample.data)
        output.write(bytes(int(header["alloc_table_ptr"][0]) - file.tell()))
        output.write(_table(pointers, images).tobytes())
        return file.tell(), output.digest.hexdigest()


def _samples(folder: Path, record: Record) -> Iterator[np.ndarray]:
    """Yield the image of every sample of a block, uint8; refuse a changed shard."""
    for (name, size, digest), noted in zip(record.files, record.shards, strict=True):
        path, entry = folder / name, ShardEntry.model_validate({**noted, "zip_data": None})
        data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        if len(data) != size or hashlib.sha256(data.data).hexdigest() != digest:
            raise UserError(
                f"{path} has changed since it was written; remove it and convert again."
            )
        offsets = entry.offsets(data[: 4 * (entry.num_samples + 2)])
        assert offsets is not None
        for begin, end in itertools.pairwise(offsets.tolist()):
            columns = entry.cut(data[begin:end])
            assert columns is not None
            yield columns["image"]


def _describe_fields(fields: dict[str, Any]) -> np.ndarray:
    described = np.zeros(len(fields), FieldDescType)
    type_ids = {kind: number for number, kind in TYPE_ID_HANDLER.items()}
    for entry, (name, field) in zip(described, fields.items(), strict=True):
        entry["type_id"] = type_ids[type(field)]
        entry["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
        entry["arguments"][:] = field.to_binary()[0]
    return described


def _lay_out(sizes: np.ndarray, page_size: int) -> tuple[np.ndarray, int]:
    """Return the start of each sample, which never crosses pages, and the number of pages."""
    ends = np.cumsum(sizes)
    offsets = ends - sizes
    num_pages = first = 0
    while first < len(sizes):
        begin = int(ends[first] - sizes[first])
        last = int(np.searchsorted(ends, begin + page_size, side="right"))
        offsets[first:last] += num_pages * page_size - begin
        num_pages, first = num_pages + 1, last
    return offsets, num_pages


def _fill(metadata: np.ndarray, records: Sequence[Record], pointers: np.ndarray) -> None:
    names = metadata.dtype.names
    assert names is not None
    image = metadata[names[0]]
    sides = np.concatenate([np.array(record.sides, np.int64).reshape(-1, 2) for record in records])
    image["mode"] = IMAGE_MODES["jpg"]
    image["width"], image["height"] = sides.T
    image["data_ptr"] = pointers
    metadata[names[1]] = np.concatenate([np.array(record.labels, int) for record in records])


def _table(pointers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return one entry for every image, in order."""
    table = np.zeros(len(sizes), ALLOC_TABLE_TYPE)
    table["sample_id"], table["ptr"], table["size"] = np.arange(len(sizes)), pointers, sizes
    return table


def page_size_for(items: Sequence[Item]) -> int:
    """Return the size of a page: a power of two that fits the largest image, encoded again.

    A JPEG at most doubles when it is turned or shrunk. WebP, AVIF or PNG may grow many times, so
    for these a page has at least the stock size, and eight times their size as long as it stays
    small. Images that still do not fit are left out by name.
    """
    is_jpeg = [item.name.lower().endswith(_JPEG_EXTENSIONS) and item.size > 0 for item in items]
    others = [item.size for item, jpeg in zip(items, is_jpeg, strict=True) if not jpeg]
    is_large = bool(others) or sum(item.size for item in items) > _MANY_BYTES
    page = _STOCK_PAGE_SIZE if is_large else MIN_PAGE_SIZE
    grown = min(8 * max(others, default=0), _LONGEST_GROWN_JPEG)
    needed = max(page, grown, 2 * max(item.size for item in items))
    return min(1 << math.ceil(math.log2(needed)), _MAX_PAGE_SIZE)


class _Hashed:
    """A file whose bytes are hashed as they are written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
