"""The .beton file that we lay out beside the one that FFCV's own writer makes of the same bytes."""

# ruff: noqa: E402

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.libraries import needs_ffcv

needs_ffcv()

from ffcv.fields import BytesField, IntField, RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.writer import DatasetWriter

from data_prep.plan.records import Record
from data_prep.publish.beton import write_beton
from data_prep.publish.shards import BlockWriter
from data_prep.sources.source import Item
from pospre.data.opening import open_reader

PAGE_SIZE = 1 << 21


class StoredAsIs(RGBImageField):
    """Stock FFCV encodes every image anew; this stores the bytes."""

    def encode(self, destination: Any, image: np.ndarray, malloc: Any) -> None:
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["width"], destination["height"] = 30, 20
        destination["data_ptr"], storage = malloc(len(image))
        storage[:] = image


def random_samples(seed: int, annotated: bool) -> list[tuple[bytes, ...]]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 900_000, (15, 2))
    sizes[4, 0] = PAGE_SIZE - 2000  # fills a page nearly
    sizes[:, 1] //= 1000
    return [tuple(generator.bytes(n) for n in row[: 1 + annotated]) for row in sizes]


def ours(folder: Path, samples: list[tuple[bytes, ...]], annotated: bool) -> bytes:
    records = []
    columns = {"image": "bytes", **({"annotation": "bytes"} if annotated else {})}
    for number, some in enumerate((samples[:6], samples[6:6], samples[6:])):
        record, writer = Record(number, "key"), BlockWriter(folder, columns, 0)
        for sample in some:
            fields = dict(zip(columns, sample, strict=True))
            writer.write(Item("x", len(sample[0]), 0, ""), fields)
            record.labels.append(len(sample[0]))
            record.num_bytes.append(len(sample[0]))
            record.sides.append((30, 20))
            if annotated:
                record.extra_bytes.append(len(sample[1]))
        writer.finish(record)
        records.append(record)
    target = folder / "out.beton"
    found = write_beton(target, folder, records, PAGE_SIZE, annotated=annotated)
    data = target.read_bytes()
    assert found == (len(data), hashlib.sha256(data).hexdigest())
    return data


def stock(path: Path, samples: list[tuple[bytes, ...]], annotated: bool) -> bytes:
    fields: dict[str, Any] = {"image": RGBImageField("jpg"), "label": IntField()}
    fields["image"].encode = StoredAsIs().encode
    if annotated:
        fields["annotation"] = BytesField()
    rows = [
        (np.frombuffer(s[0], np.uint8), len(s[0]), *(np.frombuffer(x, np.uint8) for x in s[1:]))
        for s in samples
    ]
    DatasetWriter(str(path), fields, page_size=PAGE_SIZE, num_workers=1).from_indexed_dataset(rows)
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bytes_as_ffcv(tmp_path: Path, seed: int) -> None:
    samples = random_samples(seed, False)
    assert ours(tmp_path, samples, False) == stock(tmp_path / "stock.beton", samples, False)


def test_annotations_are_what_ffcv_reads(tmp_path: Path) -> None:
    from ffcv.reader import Reader

    samples = random_samples(5, True)
    samples[3] = (samples[3][0], b"")
    data = ours(tmp_path, samples, True)
    stock_reader = Reader(str(tmp_path / "out.beton"))
    assert stock_reader.field_names == ["image", "label", "annotation"]
    for record, (image, annotation) in zip(stock_reader.metadata, samples, strict=True):
        begin = int(record[0]["data_ptr"])
        assert data[begin : begin + len(image)] == image and record[1] == len(image)
        begin, size = int(record[2]["ptr"]), int(record[2]["size"])
        assert data[begin : begin + size] == annotation and size == len(annotation)
        if size:  # both in one page: FFCV keeps a sample's pages together
            assert int(record[0]["data_ptr"]) // PAGE_SIZE == (begin + size - 1) // PAGE_SIZE
    reader = open_reader(tmp_path / "out.beton")
    read = [reader.read(index).encoded.numpy().tobytes() for index in range(len(reader))]
    assert read == [image for image, _ in samples]
