"""A .beton file, written through FFCV's own DatasetWriter, fields and allocator.

Stock FFCV encodes in worker processes: when one of them fails (an image that cannot be read, a full
disk) the parent waits for ever and leaves a file without metadata. And its RGBImageField always
encodes anew. Here the images come prepared, and FFCV's code runs in this process: an error is
raised where it happens, the order is that of the source, and every JPEG is stored byte for byte.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.memory_allocator import MemoryAllocator
from ffcv.types import ALLOC_TABLE_TYPE
from ffcv.writer import MIN_PAGE_SIZE, DatasetWriter, handle_sample

from data_prep.images import PreparedImage
from data_prep.sidecar import BETON_NAME
from data_prep.sources.source import Item

_STOCK_PAGE_SIZE = 4 * MIN_PAGE_SIZE
_MAX_PAGE_SIZE = 1 << 31
_MANY_BYTES = 1 << 27
_LONGEST_GROWN_JPEG = 1 << 26
_JPEG_EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif")


class Writer:
    """Writes samples in the order given; ``finish`` makes the file complete.

    Attributes:
        max_bytes: the largest JPEG that can be written.
    """

    def __init__(self, folder: Path, source: tuple[Item, ...]) -> None:
        self._path = folder / BETON_NAME
        self.max_bytes = page_size = _page_size(source)
        fields = {"image": _jpeg_field(), "label": IntField()}
        self._writer = DatasetWriter(str(self._path), fields, page_size=page_size, num_workers=1)
        # Room for every candidate; those that turn out unreadable leave theirs unused at the end.
        self._writer.num_samples = len(source)
        self._writer.prepare()
        self._replace_shared_memory(len(source))
        self._allocator = _Allocator(str(self._path), self._writer.data_region_start, page_size)
        self._allocator.__enter__()
        self._num_written = 0

    def write(self, item: Item, image: PreparedImage) -> None:
        """Append one sample."""
        sample = (image, item.label)
        names, fields = self._writer.metadata_type.names, self._writer.fields
        handle_sample(sample, self._num_written, names, self._metadata, self._allocator, fields)
        self._num_written += 1

    def finish(self) -> None:
        """Write the last page, the metadata, the allocation table and the header, in this order."""
        self._allocator.__exit__(None, None, None)
        self._writer.header["num_samples"] = self._num_written
        self._writer.finalize(self._allocator.allocations)
        table_end = int(self._writer.header["alloc_table_ptr"])
        table_end += self._num_written * ALLOC_TABLE_TYPE.itemsize
        if self._path.stat().st_size != table_end:
            raise OSError(f"FFCV wrote {self._path.stat().st_size} bytes instead of {table_end}")

    def abort(self) -> None:
        """Close the file; what it holds is thrown away with its folder."""
        self._allocator.fp.close()

    def _replace_shared_memory(self, num_samples: int) -> None:
        """Hold the metadata in plain memory: /dev/shm may be small, and a kill would leak there."""
        self._writer.metadata_sm.close()
        self._writer.metadata_sm.unlink()
        self._metadata = np.zeros(num_samples, dtype=self._writer.metadata_type)
        self._writer.metadata_sm = SimpleNamespace(buf=self._metadata.view(np.uint8))


class _Allocator(MemoryAllocator):
    """FFCV's allocator over a buffered file: an unbuffered one cuts a write short silently."""

    def __enter__(self) -> None:
        self.fp = open(self.fname, "ab")


def _jpeg_field() -> Any:
    """Return an RGBImageField that stores a prepared JPEG as it is.

    The method is replaced on the instance because FFCV notes the exact type in the file: a subclass
    would be written as a custom field, which a stock Loader refuses.
    """
    field = RGBImageField(write_mode="jpg")
    field.encode = _store_jpeg
    return field


def _store_jpeg(destination: Any, image: PreparedImage, malloc: Any) -> None:
    destination["mode"] = IMAGE_MODES["jpg"]
    destination["width"], destination["height"] = image.width, image.height
    destination["data_ptr"], storage = malloc(len(image.jpeg))
    storage[:] = np.frombuffer(image.jpeg, dtype=np.uint8)


def _page_size(source: tuple[Item, ...]) -> int:
    """Return a power of two that holds the largest image, with room for its re-encoding.

    A JPEG at most doubles when it is turned or shrunk. WebP, AVIF or PNG may grow many times, so
    these get the stock page at least and eight times their size as long as a page stays small;
    what then still does not fit is left out by name.
    """
    is_jpeg = [item.name.lower().endswith(_JPEG_EXTENSIONS) for item in source]
    others = [item.size for item, jpeg in zip(source, is_jpeg, strict=True) if not jpeg]
    is_large = bool(others) or sum(item.size for item in source) > _MANY_BYTES
    page = _STOCK_PAGE_SIZE if is_large else MIN_PAGE_SIZE
    grown = min(8 * max(others, default=0), _LONGEST_GROWN_JPEG)
    needed = max(page, grown, 2 * max(item.size for item in source))
    return min(1 << math.ceil(math.log2(needed)), _MAX_PAGE_SIZE)
