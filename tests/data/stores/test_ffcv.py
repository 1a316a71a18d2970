""".beton files: stock ones are read; those that FFCV would read as garbage are refused."""

# ruff: noqa: E402

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.stores.ffcv import FfcvReader
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from tests import refusals
from tests.disk import overwrite
from tests.libraries import needs_ffcv
from tests.processes import finished

needs_ffcv()

from ffcv.fields import BytesField, FloatField, IntField, RGBImageField
from ffcv.types import FieldDescType, HeaderType
from ffcv.writer import DatasetWriter

NUM_IMAGES = 22


@pytest.fixture
def beton(stored: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to damage, with its description."""
    original = stored("ffcv")
    for suffix in ("", ".json"):
        shutil.copy(f"{original}{suffix}", tmp_path / f"copy.beton{suffix}")
    return tmp_path / "copy.beton"


@pytest.fixture
def bare(beton: Path) -> Path:
    """The same without a description, as other programs write it."""
    beton.with_name("copy.beton.json").unlink()
    return beton


def refuses(path: Path, *said: str) -> None:
    words = [re.escape(each) for each in (str(path), "--format ffcv", *said)]
    refusals.refuses(words, lambda: open_reader(path), path.parent)


def header(path: Path) -> np.void:
    return np.fromfile(path, HeaderType, 1)[0]


def edit_header(path: Path, **values: int) -> None:
    record = header(path).copy()
    for name, value in values.items():
        record[name] = value
    overwrite(path, 0, record.tobytes())


METADATA_START = HeaderType.itemsize + 2 * FieldDescType.itemsize


class Pictures:
    """An indexable data set for FFCV's own writer."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        noise = np.random.default_rng(index).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        size = (40 + index, 30)
        return np.asarray(Image.fromarray(noise).resize(size)), 10 * index


@pytest.mark.parametrize("mode", ["raw", "jpg"])
def test_files_of_ffcvs_own_writer(tmp_path, mode):
    path = tmp_path / "stock.beton"
    fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(Pictures(mode))
    views = [ViewGroup(size=24, crop="center")]
    loader = build_loader(path, views=views, batch_size=6, seed=0, shuffle=False, num_workers=1)
    (batch,) = loader
    assert loader.classes is None and batch["label"].tolist() == [0, 10, 20, 30, 40, 50]
    if mode == "raw":
        pixels = loader.reader.read(3).encoded.numpy()
        assert np.array_equal(pixels, Pictures(mode)[3][0])


def test_other_fields_are_refused(tmp_path):
    path = tmp_path / "other.beton"
    fields = {"image": RGBImageField(), "label": FloatField()}
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(Pictures("raw"))
    refuses(path, "'label': 'FloatField'", "needed: image RGBImageField")


class Annotated:
    """The same with fields that are not read here, before and after."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, float, int, np.ndarray]:
        image, label = Pictures("raw")[index]
        numbers = np.arange(index + 1, dtype=np.uint8)
        return numbers, image, float(index), label, numbers[::-1].copy()


def test_further_fields_are_passed_over(tmp_path):
    path = tmp_path / "annotated.beton"
    fields = {
        "annotation": BytesField(),
        "image": RGBImageField(write_mode="raw"),
        "weight": FloatField(),
        "label": IntField(),
        "notes": BytesField(),
    }
    DatasetWriter(str(path), fields, num_workers=2).from_indexed_dataset(Annotated())
    reader = open_reader(path)
    assert len(reader) == 6
    for index in range(6):
        image, label = Pictures("raw")[index]
        sample = reader.read(index)
        assert np.array_equal(sample.encoded.numpy(), image) and sample.label == label


def no_metadata(path: Path) -> None:
    """What FFCV leaves when a writing process dies: a whole file whose metadata are zero."""
    overwrite(path, METADATA_START, bytes(FfcvReader(path)._images.base.nbytes))


def one_without_metadata(path: Path) -> None:
    record = FfcvReader(path)._images.base.dtype.itemsize
    overwrite(path, METADATA_START + 4 * record, bytes(record))


def no_table(path: Path) -> None:
    table = int(header(path)["alloc_table_ptr"])
    overwrite(path, table, bytes(path.stat().st_size - table))


def cut(path: Path, kept: float) -> None:
    size = path.stat().st_size
    os.truncate(path, int(kept * size) if isinstance(kept, float) else kept % size)


EMPTY = "empty or inconsistent metadata"
HEADERS: list[tuple[str, dict[str, int]]] = [
    ("is not a .beton file of version 2", {"version": 1}),
    ("has no samples", {"num_samples": 0}),
    ("counts 0 fields", {"num_fields": 0}),
    ("counts 9999 fields", {"num_fields": 9999}),
    ("was not finished", {"alloc_table_ptr": 0}),
    ("is truncated", {"alloc_table_ptr": 1 << 40}),
    ("counts 1099511627776 samples", {"num_samples": 1 << 40}),
    ("counts 500000 samples", {"num_samples": 500_000}),
    ("metadata", {"num_samples": NUM_IMAGES + 1}),
    ("metadata", {"num_fields": 3}),
]


@pytest.mark.parametrize(
    ("said", "change"),
    [
        *((said, lambda bare, of=values: edit_header(bare, **of)) for said, values in HEADERS),
        (f"{EMPTY}: {NUM_IMAGES} of {NUM_IMAGES} samples", no_metadata),
        (f"1 of {NUM_IMAGES} samples, first sample 4", one_without_metadata),
        (EMPTY, no_table),
        *(("", partial(cut, kept=kept)) for kept in (10, 1000, 0.5, 0.99999, -1, -24)),
        *(
            ("is not a .beton file", partial(Path.write_bytes, data=data))
            for data in (b"", b"\x02", bytes(5000))
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    bare: Path, said: str, change: Callable[[Path], object]
) -> None:
    change(bare)
    refuses(bare, said)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bytes": 5}, "copy.beton.json says otherwise"),
        ({"samples": 5}, "has 5 samples, but the data have 22"),
        ({"version": 9}, "version 9"),
        ({"format": "pospre-mds"}, "has format 'pospre-mds'"),
    ],
)
def test_a_description_that_does_not_fit(beton: Path, values: dict[str, Any], said: str) -> None:
    sidecar = beton.with_name("copy.beton.json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **values}))
    refuses(beton, said)


def test_importing_ffcv_changes_nothing_else(beton):
    """It sets torch to one thread; and where numba's dict is compiled, two seconds are lost."""
    code = (
        "import sys, torch, numba.typed; torch.set_num_threads(3); typed = numba.typed.Dict\n"
        "from pospre.data.opening import open_reader; open_reader(sys.argv[1])\n"
        "assert 'ffcv' in sys.modules and torch.get_num_threads() == 3\n"
        "assert numba.typed.Dict is typed and typed is not dict\n"
        "assert type(sys.modules['ffcv.fields.rgb_image'].IMAGE_MODES) is dict"
    )
    done = finished([sys.executable, "-c", code, str(beton)])
    assert done.returncode == 0, done.stderr


def test_without_ffcv_there_is_a_way_out(beton, monkeypatch):
    monkeypatch.setitem(sys.modules, "ffcv.reader", None)  # as where libopencv is missing
    with pytest.raises(UserError, match=r"needs FFCV.*ffcv\.reader.*make setup"):
        open_reader(beton)
