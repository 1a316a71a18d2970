""".beton files: stock ones are read; those that FFCV would read as garbage are refused."""

# ruff: noqa: E402

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.stores.ffcv import FfcvReader
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
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
    with pytest.raises(UserError) as caught:
        open_reader(path)
    for words in (str(path), "--format ffcv", *said):
        assert words in str(caught.value)


def header(path: Path) -> np.void:
    return np.fromfile(path, HeaderType, 1)[0]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


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


@pytest.mark.parametrize("content", [b"", b"\x02", bytes(5000)])
def test_what_is_no_beton(bare, content):
    bare.write_bytes(content)
    refuses(bare, "is not a .beton file")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"version": 1}, "is not a .beton file of version 2"),
        ({"num_samples": 0}, "has no samples"),
        ({"num_fields": 0}, "counts 0 fields"),
        ({"num_fields": 9999}, "counts 9999 fields"),
        ({"alloc_table_ptr": 0}, "was not finished"),
        ({"alloc_table_ptr": 1 << 40}, "is truncated"),
        ({"num_samples": 1 << 40}, "counts 1099511627776 samples"),
        ({"num_samples": 500_000}, "counts 500000 samples"),
        ({"num_samples": NUM_IMAGES + 1}, "metadata"),
        ({"num_fields": 3}, "metadata"),
    ],
)
def test_inconsistent_headers(bare, values, said):
    edit_header(bare, **values)
    refuses(bare, said)


def test_empty_metadata(bare):
    """What FFCV leaves when a writing process dies: a whole file whose metadata are zero."""
    size = FfcvReader(bare)._images.base.nbytes
    overwrite(bare, METADATA_START, bytes(size))
    refuses(bare, f"empty or inconsistent metadata: {NUM_IMAGES} of {NUM_IMAGES} samples")


def test_one_sample_without_metadata(bare):
    record = FfcvReader(bare)._images.base.dtype.itemsize
    overwrite(bare, METADATA_START + 4 * record, bytes(record))
    refuses(bare, f"1 of {NUM_IMAGES} samples, first sample 4")


def test_an_empty_allocation_table(bare):
    table = int(header(bare)["alloc_table_ptr"])
    overwrite(bare, table, bytes(bare.stat().st_size - table))
    refuses(bare, "empty or inconsistent metadata")


@pytest.mark.parametrize("kept", [10, 1000, 0.5, 0.99999, -1, -24])
def test_truncated_files(bare, kept):
    size = bare.stat().st_size
    end = int(kept * size) if isinstance(kept, float) else kept % size
    with bare.open("r+b") as file:
        file.truncate(end)
    refuses(bare)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bytes": 5}, "copy.beton.json says otherwise"),
        ({"samples": 5}, "has 5 samples, but the data have 22"),
        ({"version": 9}, "version 9"),
        ({"format": "pospre-mds"}, "has format 'pospre-mds'"),
    ],
)
def test_a_description_that_does_not_fit(beton, values, said):
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
