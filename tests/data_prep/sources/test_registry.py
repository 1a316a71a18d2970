from pathlib import Path

import pytest

from data_prep.sources.registry import KINDS, open_source
from pospre.data.stores.splits import split_of_name
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, refuses, text


def test_unknown_kind_and_path(tmp_path: Path) -> None:
    refuses(r"--source cocoo: there is no such kind. Did you mean 'co", tmp_path, kind="cocoo")
    refuses(r"nowhere does not exist", tmp_path / "nowhere", kind="coco")
    (tmp_path / "file.bin").write_bytes(b"x")
    refuses(r"file\.bin is a file of no known kind", tmp_path / "file.bin")


def test_two_kinds_at_once(tmp_path: Path) -> None:
    files = {"annotations/instances_train.json": b"{}", "train.json": b"{}", "a/1.jpg": JPEGS[0]}
    refuses(r"may be coco or inaturalist; choose with --source", write_files(tmp_path, files))


def test_a_name_that_is_listed_twice(tmp_path: Path) -> None:
    image = {"file_name": "a/1.jpg", "width": 4, "height": 4}
    content = {"categories": [], "annotations": [], "images": [image | {"id": n} for n in (1, 2)]}
    root = write_files(tmp_path, {"train.json": text(content), "a/1.jpg": JPEGS[0]})
    refuses(r"a/1\.jpg is listed twice", root)


def test_damaged_zips_matter_to_those_who_read_them(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"cat/1.jpg": JPEGS[0], "backup.zip": b"PK no zip"})
    assert open_source(root).kind == "image_folder"
    write_files(root, {"annotations/instances_train.json": b"{}"})
    refuses(r"backup\.zip is not a zip", root)
    refuses(r"backup\.zip is not a zip", root / "backup.zip")


def test_a_kind_that_was_named_wrongly(tmp_path: Path) -> None:
    root = write_files(tmp_path / "photos", {"cat/1.jpg": JPEGS[0], "dog/1.jpg": JPEGS[1]})
    for kind in sorted(set(KINDS) - {"image_folder"}):
        refuses(r"photos", root, kind=kind, split="train")
    assert open_source(root).kind == "image_folder"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("data/train-00000-of-00002-ab.parquet", "train"),
        ("imagenet-validation-03.tar", "val"),
        ("valid/x.tar", "val"),
        ("test.parquet", "test"),
        ("training_set", "train"),
        ("trains", None),
        ("contest-1.tar", None),
        ("restrain.tar", None),
    ],
)
def test_splits_by_name(name: str, split: str | None) -> None:
    assert split_of_name(name) == split
