"""A .beton file in FFCV's format, from the pieces that the workers write.

Stock FFCV encodes in worker processes: when one of them fails (an image that cannot be read, a full
disk) the parent waits for ever and leaves a file without metadata, and the order of the pages
depends on who is faster. And its RGBImageField always encodes anew. Here a piece holds the
prepared images of a block end to end, and the file is laid out from their sizes as FFCV's allocator
would do it with one worker, by means of FFCV's own types.
"""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from ffcv.fields import BytesField, IntField, RGBImageField
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

from data_prep.in_order import in_order
from data_prep.plan.records import Record
from data_prep.sources.source import Item
from pospre.errors import UserError

_STOCK_PAGE_SIZE = 4 * MIN_PAGE_SIZE
_MAX_PAGE_SIZE = 1 << 31
_MANY_BYTES = 1 << 27
_LONGEST_GROWN_JPEG = 1 << 26
_JPEG_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif")


class BlockWriter:
    """Writes the images of a block (each followed by its annotation) end to end.

    Attributes:
        max_bytes: the largest sample that can be written.
    """

    def __init__(self, folder: Path, columns: dict[str, str], limit: int) -> None:
        self.max_bytes, self._columns = limit, columns
        self._path = folder / "piece"
        self._output = _Hashed(self._path.open("wb"))

    def write(self, item: Item, sample: dict[str, bytes]) -> None:
        """Append one sample, given by field."""
        for name in self._columns:
            self._output.write(sample[name])

    def finish(self, record: Record) -> None:
        """Close the piece, and note it under a name that no other block uses."""
        num_bytes = self._output.file.tell()
        self._output.file.close()
        path = self._path.rename(self._path.with_name(f"piece.{record.number:05d}"))
        record.files.append((path.name, num_bytes, self._output.digest.hexdigest()))

    def abort(self) -> None:
        """Close the piece; what it holds is thrown away with its folder."""
        self._output.file.close()


def write_beton(
    target: Path, folder: Path, records: Sequence[Record], page_size: int, *, annotated: bool
) -> tuple[int, str]:
    """Put the pieces together; return the bytes and the SHA-256 of the file.

    The order of the sections is FFCV's: header, fields, metadata, pages, table of allocations.

    Raises:
        UserError: a piece has changed since it was written.
    """
    fields: dict[str, Any] = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    if annotated:
        fields["annotation"] = BytesField()
    head = _describe_fields(fields)
    images = np.concatenate([np.array(record.num_bytes, np.int64) for record in records])
    extra = np.zeros_like(images)
    if annotated:
        extra = np.concatenate([np.array(record.extra_bytes, np.int64) for record in records])
    metadata = np.zeros(len(images), get_metadata_type(list(fields.values())))
    start = HeaderType.itemsize + head.nbytes + metadata.nbytes
    data_start = align_to_page(start, page_size)
    offsets, num_pages = _lay_out(images + extra, page_size)
    pointers = data_start + offsets
    _fill(metadata, records, pointers, images, extra if annotated else None)
    header = np.zeros(1, HeaderType)
    header["version"], header["num_fields"] = CURRENT_VERSION, len(fields)
    header["page_size"], header["num_samples"] = page_size, len(images)
    header["alloc_table_ptr"] = data_start + num_pages * page_size
    gaps = np.diff(offsets, prepend=0) - np.append(0, (images + extra)[:-1])
    with target.open("wb") as file:
        output = _Hashed(file)
        for section in (header, head, metadata):
            output.write(section.tobytes())
        output.write(bytes(data_start - start))
        _copy(folder, records, images + extra, gaps, output)
        output.write(bytes(int(header["alloc_table_ptr"][0]) - file.tell()))
        output.write(_table(pointers, images, extra).tobytes())
        return file.tell(), output.digest.hexdigest()


def _copy(
    folder: Path, records: Sequence[Record], sizes: np.ndarray, gaps: np.ndarray, output: "_Hashed"
) -> None:
    """Write the samples of all pieces, with zeros before those that begin a page."""
    files = [entry for record in records for entry in record.files]
    first = 0
    with ThreadPoolExecutor(1) as background:  # pieces are read and hashed beside the writing
        pieces = in_order(background, partial(_read_piece, folder), files, num_pending=2)
        for record, data in zip(records, pieces, strict=True):
            begin, last = 0, first + len(record.labels)
            for number in first + np.flatnonzero(gaps[first:last]):
                end = int(sizes[first:number].sum())
                output.write(data[begin:end])
                output.write(bytes(int(gaps[number])))
                begin = end
            output.write(data[begin:])
            first = last


def _read_piece(folder: Path, entry: tuple[str, int, str]) -> memoryview:
    """Return what a block's writer wrote.

    Raises:
        UserError: something else is there now.
    """
    name, size, digest = entry
    path = folder / name
    data = np.memmap(path, mode="r").data if path.stat().st_size else memoryview(b"")
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise UserError(f"{path} has changed since it was written; remove it and convert again.")
    return data


def _describe_fields(fields: dict[str, Any]) -> np.ndarray:
    described = np.zeros(len(fields), FieldDescType)
    type_ids = {kind: number for number, kind in TYPE_ID_HANDLER.items()}
    for entry, (name, field) in zip(described, fields.items(), strict=True):
        entry["type_id"] = type_ids[type(field)]
        entry["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
        entry["arguments"][:] = field.to_binary()[0]
    return described


def _lay_out(sizes: np.ndarray, page_size: int) -> tuple[np.ndarray, int]:
    """Fill pages in order; a sample never crosses into the next.

    Returns:
        where each sample begins, and the number of pages.
    """
    ends = np.cumsum(sizes)
    offsets = ends - sizes
    num_pages = first = 0
    while first < len(sizes):
        begin = int(ends[first] - sizes[first])
        last = int(np.searchsorted(ends, begin + page_size, side="right"))
        offsets[first:last] += num_pages * page_size - begin
        num_pages, first = num_pages + 1, last
    return offsets, num_pages


def _fill(
    metadata: np.ndarray,
    records: Sequence[Record],
    pointers: np.ndarray,
    images: np.ndarray,
    extra: np.ndarray | None,
) -> None:
    names = metadata.dtype.names
    assert names is not None
    image = metadata[names[0]]
    sides = np.concatenate([np.array(record.sides, np.int64).reshape(-1, 2) for record in records])
    image["mode"] = IMAGE_MODES["jpg"]
    image["width"], image["height"] = sides.T
    image["data_ptr"] = pointers
    metadata[names[1]] = np.concatenate([np.array(record.labels, int) for record in records])
    if extra is not None:
        metadata[names[2]]["ptr"] = np.where(extra > 0, pointers + images, 0)
        metadata[names[2]]["size"] = extra


def _table(pointers: np.ndarray, images: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """Return one entry for every image and every annotation that is there, in their order."""
    table = np.zeros((len(images), 2), ALLOC_TABLE_TYPE)
    table["sample_id"] = np.arange(len(images))[:, None]
    table["ptr"] = np.stack([pointers, pointers + images], axis=1)
    table["size"] = np.stack([images, extra], axis=1)
    return table[table["size"] > 0]


def size_limit(items: tuple[Item, ...], largest_block: int) -> int:
    """Return the size of a page: a power of two that holds the largest image, encoded anew.

    A JPEG at most doubles when it is turned or shrunk. WebP, AVIF or PNG may grow many times, so
    these get the stock page at least and eight times their size as long as a page stays small;
    what then still does not fit is left out by name.
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
