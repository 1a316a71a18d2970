import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest

from data_prep.files.archives import DamagedItem
from data_prep.sources import parquet
from data_prep.sources.registry import open_source
from data_prep.sources.source import read_item
from pospre.errors import UserError
from tests.data_prep.sources.fakes import JPEGS, everything, labels, opened, refuses

NAMES = ["ant", "bee", "cow"]


def write(path: Path, columns: dict[str, list[Any]], names: list[str] | None = None) -> Path:
    """Write a file in groups of two rows, with the class names where Hugging Face notes them."""
    table = pyarrow.table(columns)
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        about = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": about})
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def images(*numbers: int, name: str | None = "photo") -> list[dict[str, Any]]:
    path = "{}/{}{}.jpg"
    return [
        {"bytes": JPEGS[number], "path": name and path.format("d", name, number)}
        for number in numbers
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    data = tmp_path / "birds" / "data"
    for number in range(2):
        columns: dict[str, list] = {
            "image": images(*range(3 * number, 3 * number + 3)),
            "label": [2, 0, 2],
        }
        write(data / f"train-0000{number}-of-00002-ab12.parquet", columns, NAMES)
    columns = {"image": images(6, 7, name=None), "label": [1, -1]}
    write(data / "validation-00000-of-00001.parquet", columns, NAMES)
    return data.parent


def test_rows_splits_and_names(root: Path) -> None:
    train = opened(root, "parquet", split="train")
    first = "data/train-00000-of-00002-ab12.parquet"
    assert everything(train)[:3] == [
        (f"{first}/000000_photo0.jpg", 2, JPEGS[0]),
        (f"{first}/000001_photo1.jpg", 0, JPEGS[1]),
        (f"{first}/000002_photo2.jpg", 2, JPEGS[2]),
    ]
    assert [data for _, _, data in everything(train)] == JPEGS[:6]
    assert train.classes == NAMES
    val = opened(root, "parquet", split="val")
    assert list(labels(val).values()) == [1, -1]


def test_plain_bytes_and_names_as_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "all.parquet", {"jpg": JPEGS[:3], "label": ["yak", "ant", None]})
    source = opened(path, "parquet")
    assert source.classes == ["ant", "yak"]
    assert everything(source) == [
        ("all.parquet/000000", 1, JPEGS[0]),
        ("all.parquet/000001", 0, JPEGS[1]),
        ("all.parquet/000002", -1, JPEGS[2]),
    ]
    drawn = [open_source(path, split=split, val_fraction=0.5, seed=3) for split in ("train", "val")]
    assert sum(len(each.items) for each in drawn) == 3


def test_labels_mean_the_same_in_all_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", {"image": images(0, 1), "label": ["b", "c"]})
    write(tmp_path / "test.parquet", {"image": images(2), "label": ["a"]})
    for split, found in (("train", [1, 2]), ("test", [0])):
        source = open_source(tmp_path, split=split)
        assert source.classes == ["a", "b", "c"] and list(labels(source).values()) == found


def test_splits_are_drawn_where_no_name_tells_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.parquet", {"image": images(0, 1, 2)})
    drawn = [open_source(tmp_path, split=split, val_fraction=0.5) for split in ("train", "val")]
    assert sum(len(each.items) for each in drawn) == 6


def test_no_labels(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.parquet", {"image": images(0)}))
    assert source.classes is None and list(labels(source).values()) == [-1]


def test_rows_without_an_image_are_named(tmp_path: Path) -> None:
    empty = {"bytes": None, "path": "elsewhere.jpg"}
    source = open_source(write(tmp_path / "a.parquet", {"image": [*images(0), empty]}))
    with pytest.raises(DamagedItem, match="the row has no image bytes"):
        read_item(source, source.items[1])
    assert read_item(source, source.items[0]) == JPEGS[0]


def test_damage(root: Path) -> None:
    path = root / "data" / "train-00001-of-00002-ab12.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    refuses(r"train-00001.* is damaged or not a parquet file", root, split="train")
    at = whole.index(JPEGS[3][-60:]) - 200
    path.write_bytes(whole[:at] + b"\xff" * 200 + whole[at + 200 :])
    source = open_source(root, split="train")
    assert [read_item(source, item) for item in source.items[:3]] == JPEGS[:3]
    with pytest.raises(DamagedItem, match="row group 0: "):
        read_item(source, source.items[3])


def test_a_large_row_group_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pyarrow holds at most 2 GiB of a column in one; damage leaves the parts before it."""
    monkeypatch.setattr(parquet, "_PART_ROWS", 3)
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"image": images(*range(8)), "label": [0] * 8})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(
        table, path, data_page_size=1, write_batch_size=1, write_page_checksum=True, **options
    )
    with monkeypatch.context() as patch:
        patch.delattr(pyarrow.parquet.ParquetFile, "read_row_group")  # it fails above 2 GiB
        items = (source := open_source(path)).items
        for order in (range(8), [7, 0, 5, 5, 2]):
            assert [read_item(source, items[n]) for n in order] == [JPEGS[n] for n in order]
    data = bytearray(path.read_bytes())
    data[data.index(JPEGS[4]) + 30] ^= 1
    path.write_bytes(data)
    parquet._group.cache_clear()
    opened_files = Mock(wraps=parquet._opened)
    monkeypatch.setattr(parquet, "_opened", opened_files)
    assert [read_item(source, item) for item in items[:3]] == JPEGS[:3]
    for item in items[3:]:
        with pytest.raises(DamagedItem, match=r"row group 0: .*checksum"):
            read_item(source, item)
    assert opened_files.call_count == 1


def test_other_classes_in_another_file(root: Path) -> None:
    path = root / "data" / "train-00009.parquet"
    write(path, {"image": images(0), "label": [0]}, ["dog"])
    refuses(r"train-00009\.parquet and .* have different classes", root, split="train")


def test_flipped_bytes_are_damage_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"image": images(0, 1, 2), "label": [2, 0, 1]}, NAMES)
    whole, damaged = path.read_bytes(), 0
    rng = random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        # most of them in what describes the file, which lies at its end
        at = rng.randrange(len(data) - 3000 if rng.random() < 0.8 else 0, len(data))
        data[at] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        parquet._group.cache_clear()
        try:
            source = open_source(path)
            for item in source.items:
                read_item(source, item)
        except (UserError, DamagedItem) as error:
            damaged += 1
            assert "\n" not in str(error)
    assert 30 < damaged < 300


def test_a_flipped_label_is_told_where_pages_have_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"image": images(0, 1), "label": [0x0123456789, 1]})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(table, path, **options)
    at = path.read_bytes().index((0x0123456789).to_bytes(8, "little"))
    data = bytearray(path.read_bytes())
    data[at + 8] ^= 2
    path.write_bytes(data)
    refuses(r"a\.parquet is damaged or not a parquet file: .*checksum", path)
