"""A .beton file in FFCV's format, from the pieces that the workers write.

Stock FFCV encodes in worker processes: when one of them fails (an image that cannot be read, a full
disk) the parent waits for ever and leaves a file without metadata, and the order of the pages
depends on who is faster. And its RGBImageField always encodes anew. Here a piece holds the
prepared images of a block end to end, and the file is laid out from their sizes as FFCV's allocator
would do it with one worker, by means of FFCV's own types.
"""

import hashlib
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple

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

from data_prep.distribute.tally import Record
from data_prep.sources.source import Item

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

    def __init__(self, folder: Path, page_size: int) -> None:
        self.max_bytes = page_size
        self._path = folder / "piece"
        self._file = self._path.open("wb")
        self._digest = hashlib.sha256()

    def write(self, item: Item, sample: dict[str, bytes]) -> None:
        """Append one sample, given by field."""
        for name in ("image", "annotation"):
            data = sample.get(name, b"")
            self._file.write(data)
            self._digest.update(data)

    def finish(self, record: Record) -> None:
        """Close the piece, and note it under a name that no other block uses."""
        num_bytes = self._file.tell()
        self._file.close()
        path = self._path.rename(self._path.with_name(f"piece.{record.number:05d}"))
        record.files.append((path.name, num_bytes, self._digest.hexdigest()))

    def abort(self) -> None:
        """Close the piece; what it holds is thrown away with its folder."""
        self._file.close()


class DamagedPiece(Exception):
    """A piece is not what its writer wrote; the message is its path."""


def write_beton(
    target: Path, folder: Path, records: Sequence[Record], page_size: int, *, annotated: bool
) -> tuple[int, str]:
    """Put the pieces together; return the bytes and the SHA-256 of the file.

    The order of the sections is FFCV's: header, fields, metadata, pages, table of allocations.

    Raises:
        DamagedPiece: a piece has changed since it was written.
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
    pages, places = _lay_out(images + extra, page_size)
    pointers = data_start + places
    _fill(metadata, records, pointers, images, extra if annotated else None)
    header = np.zeros(1, HeaderType)
    header["version"], header["num_fields"] = CURRENT_VERSION, len(fields)
    header["page_size"], header["num_samples"] = page_size, len(images)
    header["alloc_table_ptr"] = data_start + len(pages) * page_size
    stream = _Stream(_pieces(folder, records))
    with target.open("wb") as file:
        output = _Hashed(file)
        for section in (header, head, metadata):
            output.write(section.tobytes())
        output.write(bytes(data_start - start))
        with closing(_read_ahead(stream, pages)) as coming:
            for page in coming:
                output.write(page)
                output.write(bytes(page_size - len(page)))
        stream.finish()
        output.write(_table(pointers, images, extra).tobytes())
        return file.tell(), output.digest.hexdigest()


def _describe_fields(fields: dict[str, Any]) -> np.ndarray:
    described = np.zeros(len(fields), FieldDescType)
    type_ids = {kind: number for number, kind in TYPE_ID_HANDLER.items()}
    for entry, (name, field) in zip(described, fields.items(), strict=True):
        entry["type_id"] = type_ids[type(field)]
        entry["name"][: len(name)] = np.frombuffer(name.encode("ascii"), np.uint8)
        entry["arguments"][:] = field.to_binary()[0]
    return described


def _lay_out(sizes: np.ndarray, page_size: int) -> tuple[list[int], np.ndarray]:
    """Fill pages in order; a sample never crosses into the next.

    Returns:
        the bytes used of every page, and where each sample begins.
    """
    ends = np.cumsum(sizes)
    places = ends - sizes
    used: list[int] = []
    first = 0
    while first < len(sizes):
        begin = int(ends[first] - sizes[first])
        last = int(np.searchsorted(ends, begin + page_size, side="right"))
        places[first:last] += len(used) * page_size - begin
        used.append(int(ends[last - 1]) - begin)
        first = last
    return used, places


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


def page_size(items: tuple[Item, ...]) -> int:
    """Return a power of two that holds the largest image, with room for its re-encoding.

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


class _Piece(NamedTuple):
    path: Path
    sha256: str


def _pieces(folder: Path, records: Sequence[Record]) -> Iterator[_Piece]:
    for record in records:
        for name, _, digest in record.files:
            yield _Piece(folder / name, digest)


class _Stream:
    """The pieces as one stream of bytes; each is checked when it has been read."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._piece: _Piece | None = None
        self._input: _Hashed | None = None

    def read(self, num_bytes: int) -> bytes:
        parts: list[bytes] = []
        while num_bytes > 0:
            block = self._input.read(num_bytes) if self._input else b""
            if not block:
                self._next()
            parts.append(block)
            num_bytes -= len(block)
        return b"".join(parts)

    def finish(self) -> None:
        """Check the last piece; nothing may be left."""
        self._close()
        for piece in self._pieces:  # of blocks without samples
            if piece.path.stat().st_size:
                raise DamagedPiece(str(piece.path))

    def _next(self) -> None:
        self._close()
        before, self._piece = self._piece, next(self._pieces, None)
        if self._piece is None:
            raise DamagedPiece(str(before.path if before else "the first piece"))
        self._input = _Hashed(self._piece.path.open("rb"))

    def _close(self) -> None:
        if self._input is None or self._piece is None:
            return
        is_whole = not self._input.read(1)
        self._input.file.close()
        if not is_whole or self._input.digest.hexdigest() != self._piece.sha256:
            raise DamagedPiece(str(self._piece.path))


def _read_ahead(stream: _Stream, sizes: Sequence[int]) -> Generator[bytes, None, None]:
    """Yield the next so many bytes, again and again, read and hashed beside what is done there."""
    with ThreadPoolExecutor(1) as background:
        coming = deque[Future[bytes]]()
        for size in sizes:
            coming.append(background.submit(stream.read, size))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class _Hashed:
    """A file whose bytes are hashed as they pass."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        data = self.file.read(num_bytes)
        self.digest.update(data)
        return data

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
