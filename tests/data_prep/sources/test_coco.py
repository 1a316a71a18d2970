import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.files.archives import DamagedItem
from data_prep.sources.registry import open_source
from data_prep.sources.source import read_item
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, converted, everything, opened, text, write_zip

TRAIN = "annotations/instances_train2017.json"


def content() -> dict[str, Any]:
    """Two images."""
    return {
        "categories": [{"id": 18, "name": "dog"}],
        "images": [
            {"id": 9, "file_name": "000000000009.jpg", "width": 48, "height": 32},
            {"id": 7, "file_name": "000000000007.jpg", "width": 48, "height": 32},
        ],
        "annotations": [{"id": 1, "image_id": 9, "category_id": 18, "bbox": [1.5, 2, 20, 9]}],
    }


def files() -> dict[str, bytes]:
    val = {"categories": [], "annotations": [], "images": content()["images"][:1]}
    return {
        TRAIN: text(content()),
        "annotations/instances_val2017.json": text(val),
        "annotations/captions_train2017.json": b"{}",
        "train2017/000000000007.jpg": JPEGS[0],
        "train2017/000000000009.jpg": JPEGS[1],
        "val2017/000000000009.jpg": JPEGS[2],
    }


def test_images(tmp_path: Path) -> None:
    root = write_files(tmp_path, files())
    train = opened(root, "coco", split="train")
    assert everything(train) == [
        ("train2017/000000000007.jpg", -1, JPEGS[0]),
        ("train2017/000000000009.jpg", -1, JPEGS[1]),
    ]
    assert train.classes is None
    assert len(opened(root, "coco", split="val").items) == 1


def test_zips_in_the_folder_to_shards(tmp_path: Path) -> None:
    for archive in ("train2017", "annotations"):
        inside = {name: data for name, data in files().items() if name.startswith(archive)}
        (tmp_path / "coco").mkdir(exist_ok=True)
        write_zip(tmp_path / "coco" / f"{archive}_all.zip", inside)
    samples = converted(tmp_path / "coco", tmp_path / "mds", "--split", "train")
    assert [sample["image"] for sample in samples] == JPEGS[:2]


def test_the_test_images_have_another_list(tmp_path: Path) -> None:
    about = {name: content()[name] for name in ("categories", "images")}
    more = {f"test2017/00000000000{n}.jpg": JPEGS[n] for n in (7,)}
    more["annotations/image_info_test2017.json"] = text(about)
    test = opened(write_files(tmp_path, files() | more), "coco", split="test")
    assert test.read(test.items[0]) == JPEGS[7]


def test_images_in_a_common_folder(tmp_path: Path) -> None:
    moved = {
        name.replace("train2017/", "images/train2017/"): data for name, data in files().items()
    }
    source = opened(write_files(tmp_path, moved), "coco", split="train")
    assert [source.read(item) for item in source.items] == JPEGS[:2]


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    outside = write_files(tmp_path / "outside", {"secret.jpg": JPEGS[7]}) / "secret.jpg"
    for name in ("../../outside/secret.jpg", str(outside)):
        changed = content()
        changed["images"][0]["file_name"] = name
        root = write_files(tmp_path / "coco", files() | {TRAIN: text(changed)})
        source = open_source(root, split="train")
        assert source.items[0].size == 0
        with pytest.raises(DamagedItem, match="it is listed, but missing"):
            read_item(source, source.items[0])


def test_absent_images_are_counted_and_named(tmp_path: Path) -> None:
    root = write_files(tmp_path / "coco", files())
    (root / "train2017/000000000009.jpg").unlink()
    assert len(converted(root, tmp_path / "mds", "--split", "train")) == 1
    content = json.loads((tmp_path / "mds" / "pospre.json").read_text())
    lost = {"path": "train2017/000000000009.jpg", "reason": "it is listed, but missing"}
    assert content["skipped"] == [lost]
