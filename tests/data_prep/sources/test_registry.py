from pathlib import Path

import pytest

from data_prep.sources.registry import KINDS, open_source
from pospre.data.stores.splits import split_of_name
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, refuses


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
