from pathlib import Path

import pytest

from data_prep.files.archives import DamagedItem
from data_prep.sources.registry import open_source
from data_prep.sources.source import read_item
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, everything, labels, opened, text

VAL = "val/val_annotations.txt"


def files() -> dict[str, bytes]:
    """Two classes, listed in another order than the sorted one."""
    found = {
        "wnids.txt": text(["n02", "n01"]),
        "train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t9\t9\n",
        VAL: text(["val_0.JPEG\tn02\t0\t0\t9\t9", "val_1.JPEG\tn01\t0\t0\t9\t9"]),
        "test/images/test_0.JPEG": JPEGS[6],
    }
    for number, name in enumerate(("n01/images/n01_0", "n01/images/n01_1", "n02/images/n02_0")):
        found[f"train/{name}.JPEG"] = JPEGS[number]
    return found | {f"val/images/val_{number}.JPEG": JPEGS[4 + number] for number in range(2)}


def test_splits_labels_and_names(tmp_path: Path) -> None:
    root = write_files(tmp_path / "tiny-imagenet-200", files())
    train = opened(root, "tiny_imagenet", split="train")
    assert everything(train) == [
        ("train/n01/images/n01_0.JPEG", 0, JPEGS[0]),
        ("train/n01/images/n01_1.JPEG", 0, JPEGS[1]),
        ("train/n02/images/n02_0.JPEG", 1, JPEGS[2]),
    ]
    assert train.classes == ["n01", "n02"]
    assert train.num_ignored == 1
    val = opened(root, "tiny_imagenet", split="val")
    assert labels(val) == {"val/images/val_0.JPEG": 1, "val/images/val_1.JPEG": 0}
    assert list(labels(opened(root, "tiny_imagenet", split="test")).values()) == [-1]


def test_a_folder_around_it_is_looked_into(tmp_path: Path) -> None:
    outside = write_files(tmp_path / "outside" / "tiny-imagenet-200", files()).parent
    assert len(opened(outside, "tiny_imagenet", split="train").items) == 3


def test_validation_images_sorted_into_classes(tmp_path: Path) -> None:
    moved = {name: data for name, data in files().items() if not name.startswith("val/")}
    root = write_files(tmp_path, moved | {"val/n02/images/val_0.JPEG": JPEGS[4]})
    assert labels(opened(root, "tiny_imagenet", split="val")) == {"val/n02/images/val_0.JPEG": 1}


def test_a_listed_image_that_is_absent_is_named_later(tmp_path: Path) -> None:
    root = write_files(tmp_path, files())
    (root / "val/images/val_1.JPEG").unlink()
    source = open_source(root, split="val")
    lost = {item.name: item for item in source.items}["val/images/val_1.JPEG"]
    with pytest.raises(DamagedItem, match="it is listed, but missing"):
        read_item(source, lost)
