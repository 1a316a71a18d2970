import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.encode.read_items import read_item
from data_prep.files.archives import DamagedItem
from data_prep.sources.registry import open_source
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import (
    JPEGS,
    annotations,
    converted,
    everything,
    opened,
    refuses,
    text,
    write_zip,
)

TRAIN = "annotations/instances_train2017.json"


def content() -> dict[str, Any]:
    """Two images; the categories' ids have gaps."""
    return {
        "info": {},
        "categories": [
            {"id": 18, "name": "dog", "supercategory": "animal"},
            {"id": 1, "name": "person", "supercategory": "person"},
        ],
        "images": [
            {"id": 9, "file_name": "000000000009.jpg", "width": 48, "height": 32},
            {"id": 7, "file_name": "000000000007.jpg", "width": 48, "height": 32},
        ],
        "annotations": [
            {"id": 1, "image_id": 9, "category_id": 18, "bbox": [1.5, 2, 20, 9], "iscrowd": 0,
             "area": 180, "segmentation": [[1.5, 2, 21.5, 2, 21.5, 11]]},
            {"id": 2, "image_id": 9, "category_id": 1, "bbox": [0, 0, 4, 4], "iscrowd": 1,
             "area": 16, "segmentation": {"counts": [4, 2, 9], "size": [32, 48]}},
        ],
    }  # fmt: skip


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


ABOUT = [
    {"image_id": 7, "width": 48, "height": 32, "boxes": [], "labels": [], "iscrowd": [],
     "segmentation": []},
    {"image_id": 9, "width": 48, "height": 32, "boxes": [[1.5, 2, 20, 9], [0, 0, 4, 4]],
     "labels": [1, 0], "iscrowd": [0, 1], "segmentation": [
         [[1.5, 2, 21.5, 2, 21.5, 11]], {"counts": [4, 2, 9], "size": [32, 48]}]},
]  # fmt: skip


def test_objects(tmp_path: Path) -> None:
    root = write_files(tmp_path, files())
    train = opened(root, "coco", split="train")
    assert everything(train) == [
        ("train2017/000000000007.jpg", -1, JPEGS[0]),
        ("train2017/000000000009.jpg", -1, JPEGS[1]),
    ]
    assert train.classes is None and train.annotation_classes == ["person", "dog"]
    assert annotations(train) == ABOUT
    assert len(opened(root, "coco", split="val").items) == 1


def test_zips_in_the_folder_to_shards(tmp_path: Path) -> None:
    for archive in ("train2017", "annotations"):
        inside = {name: data for name, data in files().items() if name.startswith(archive)}
        (tmp_path / "coco").mkdir(exist_ok=True)
        write_zip(tmp_path / "coco" / f"{archive}_all.zip", inside)
    samples = converted(tmp_path / "coco", tmp_path / "mds", "--split", "train")
    assert [json.loads(sample["annotation"]) for sample in samples] == ABOUT
    assert [sample["image"] for sample in samples] == JPEGS[:2]


def test_the_test_images_have_no_objects(tmp_path: Path) -> None:
    about = {name: content()[name] for name in ("categories", "images")}
    more = {f"test2017/00000000000{n}.jpg": JPEGS[n] for n in (7,)}
    more["annotations/image_info_test2017.json"] = text(about)
    test = opened(write_files(tmp_path, files() | more), "coco", split="test")
    assert annotations(test)[0] == {"image_id": 7, "width": 48, "height": 32}


def test_images_in_a_common_folder(tmp_path: Path) -> None:
    moved = {
        name.replace("train2017/", "images/train2017/"): data for name, data in files().items()
    }
    source = opened(write_files(tmp_path, moved), "coco", split="train")
    assert [source.read(item) for item in source.items] == JPEGS[:2]


def test_labels_mean_the_same_in_all_splits(tmp_path: Path) -> None:
    cow = {"id": 5, "name": "cow"}
    train = content() | {"categories": [*content()["categories"], cow]}
    val = {**content(), "images": content()["images"][:1]}
    lists = {TRAIN: text(train), "annotations/instances_val2017.json": text(val)}
    root = write_files(tmp_path, files() | lists)
    source = opened(root, "coco", split="val")
    assert source.annotation_classes == ["person", "cow", "dog"]
    assert annotations(source)[0]["labels"] == [2, 0]
    stamp = source.fingerprint()
    train["categories"][2]["id"] = 50
    write_files(root, {TRAIN: text(train)})
    assert open_source(root, split="val").fingerprint() != stamp
    train["categories"][0]["name"] = "wolf"
    write_files(root, {TRAIN: text(train)})
    message = r"val2017\.json: the training split calls 'wolf' the category 18 \('dog'\)"
    refuses(message, root, split="val")


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
    assert content["skipped"] == [lost] and content["annotation_classes"] == ["person", "dog"]


def broken(**changes: Any) -> bytes:
    return text(content() | changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", r"instances_train2017\.json .* is not JSON"),
        (text({"images": []}), r"is not as expected.*in COCO.*'annotations'"),
        (broken(images=[]), r"annotations of the image 9, which is not among the images"),
        (broken(images=[{"id": 9}]), r"is not as expected.*'file_name'"),
        (
            broken(images=[], annotations=[]),
            r"instances_train2017\.json has no sample of the kind coco",
        ),
        (broken(categories=[{"id": 1, "name": "person"}]), r"annotation 1 has the category 18"),
        (broken(annotations=[3]), r"is not as expected"),
        (
            broken(categories=[{"id": key, "name": "x"} for key in (18, None, 1)]),
            r"is not as expected.*'<' not supported",
        ),
    ],
)
def test_broken_json(tmp_path: Path, data: bytes, message: str) -> None:
    refuses(message, write_files(tmp_path, files() | {TRAIN: data}), split="train")


def test_missing_folders(tmp_path: Path) -> None:
    root = write_files(tmp_path / "a", {TRAIN: text(content()), "readme.md": b"x"})
    refuses(r"annotations/instances_.* needs a folder or zip train2017", root)
    refuses(
        r"there is no annotations/instances_<train",
        write_files(tmp_path / "b", {"train2017/1.jpg": JPEGS[0]}),
        kind="coco",
    )
    write_files(root, {"annotations/instances_train2014.json": b"{}"})
    refuses(r"has .*_train2014\.json and .*_train2017\.json; move all", root)
