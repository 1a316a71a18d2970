from pathlib import Path
from typing import Any

import pytest

from data_prep.sources.registry import KINDS, open_source
from pospre.data.stores.splits import split_of_name
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources import test_ade20k as ade20k
from tests.data_prep.sources import test_clevr as clevr
from tests.data_prep.sources import test_davis as davis
from tests.data_prep.sources import test_inaturalist as inaturalist
from tests.data_prep.sources import test_tiny_imagenet as tiny_imagenet
from tests.data_prep.sources.fakes import (
    JPEGS,
    Files,
    converted,
    everything,
    opened,
    refuses,
    write_zip,
)


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


@pytest.mark.parametrize(
    ("module", "inside", "options"),
    [
        (ade20k, "ADEChallengeData2016/", ()),
        (clevr, "CLEVR_v1.0/", ("--max-side", "30")),
        (davis, "DAVIS/", ()),
        (inaturalist, "", ()),
        (tiny_imagenet, "tiny-imagenet-200/", ()),
    ],
)
def test_a_zip_is_read_in_place_and_converted(
    module: Any, inside: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    files: Files = module.files()
    there = open_source(write_files(tmp_path / "folder", files), split="train")
    archive = write_zip(tmp_path / "a.zip", {inside + name: files[name] for name in files})
    packed = opened(archive, there.kind, split="train")
    assert everything(packed) == everything(there) and packed.classes == there.classes
    samples = converted(archive, tmp_path / "mds", "--split", "train", *options)
    assert [sample["label"] for sample in samples] == [item.label for item in there.items]
