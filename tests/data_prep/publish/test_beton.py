"""The .beton file that we lay out beside the one that FFCV's own writer makes of the same bytes."""

# ruff: noqa: E402

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.libraries import needs_ffcv

needs_ffcv()

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.memory_allocator import MemoryAllocator
from ffcv.writer import DatasetWriter

from data_prep.plan.records import Record
from data_prep.publish.beton import page_size_of, write_beton
from data_prep.publish.shards import block_writer
from data_prep.sources.source import Item
from pospre.data.opening import open_reader

PAGE_SIZE = 1 << 21  # FFCV's smallest


class StoredAsIs(RGBImageField):
    """Stock FFCV encodes every image anew; this stores the bytes."""

    def encode(self, destination: Any, image: np.ndarray, malloc: Any) -> None:
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["width"], destination["height"] = 30, 20
        destination["data_ptr"], storage = malloc(len(image))
        storage[:] = image


def random_images(seed: int) -> list[bytes]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 900_000, 15)
    sizes[4] = PAGE_SIZE - 2000  # fills a page nearly
    return [generator.bytes(size) for size in sizes]


def ours(folder: Path, images: list[bytes]) -> bytes:
    records = []
    for number, some in enumerate((images[:6], images[6:6], images[6:])):
        record = Record(number, "key")
        with block_writer(folder, {"image": "bytes"}, 0, record) as write:
            for image in some:
                write(Item("x", len(image), 0, ""), {"image": image})
                record.labels.append(len(image))
                record.num_bytes.append(len(image))
                record.sides.append((30, 20))
        records.append(record)
    target = folder / "out.beton"
    write_beton(target, folder, records)
    return target.read_bytes()


def stock(path: Path, images: list[bytes]) -> bytes:
    fields: dict[str, Any] = {"image": RGBImageField("jpg"), "label": IntField()}
    fields["image"].encode = StoredAsIs().encode
    rows = [(np.frombuffer(image, np.uint8), len(image)) for image in images]
    DatasetWriter(str(path), fields, page_size=PAGE_SIZE, num_workers=1).from_indexed_dataset(rows)
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bytes_as_ffcv(tmp_path: Path, seed: int) -> None:
    images = random_images(seed)
    assert ours(tmp_path, images) == stock(tmp_path / "stock.beton", images)
    reader = open_reader(tmp_path / "out.beton")
    read = [reader.read(index).encoded.numpy().tobytes() for index in range(len(reader))]
    assert read == images


@pytest.mark.parametrize(
    ("sizes", "page"),
    [
        ([1 << 19], 1 << 21),
        ([1 << 21], 1 << 21),
        ([1, (1 << 21) + 1], 1 << 22),
        ([1 << 20] * 129, 1 << 23),
        ([(1 << 26) + 1], 1 << 27),
    ],
)
def test_a_page_holds_the_largest_image(sizes: list[int], page: int) -> None:
    records = [Record(number, "", num_bytes=[size], labels=[0], crc32c=[0])
               for number, size in enumerate(sizes)]  # fmt: skip
    assert page_size_of(records) == page


def test_a_page_that_was_written_in_part_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = MemoryAllocator.__exit__

    def cut(allocator: MemoryAllocator, *error: object) -> None:
        leave(allocator, *error)
        os.truncate(allocator.fname, os.path.getsize(allocator.fname) - 1)

    monkeypatch.setattr(MemoryAllocator, "__exit__", cut)
    with pytest.raises(OSError, match=r"only a part of a page of out\.beton"):
        ours(tmp_path, random_images(0))
