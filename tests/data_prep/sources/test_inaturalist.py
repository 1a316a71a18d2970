from pathlib import Path
from typing import Any

from data_prep.sources.registry import open_source
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, labels, opened, refuses, text

TRAIN = "train2019.json"
CATEGORIES = [
    {"id": 40, "name": "Bubo bubo", "supercategory": "Birds"},
    {"id": 3, "name": "Acer rubrum", "supercategory": "Plants"},
]


def content() -> dict[str, Any]:
    return {
        "categories": CATEGORIES,
        "images": [
            {"id": 1, "file_name": "train_val2019/Plants/3/b.jpg", "width": 48, "height": 32},
            {"id": 2, "file_name": "train_val2019/Birds/40/a.jpg"},
        ],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 3},
            {"id": 2, "image_id": 2, "category_id": 40},
        ],
    }


def files() -> dict[str, bytes]:
    test = {"images": [{"id": 5, "file_name": "test2019/c.jpg", "width": 48, "height": 32}]}
    return {
        TRAIN: text(content()),
        "test2019.json": text(test),
        "train_val2019/Plants/3/b.jpg": JPEGS[0],
        "train_val2019/Birds/40/a.jpg": JPEGS[1],
        "test2019/c.jpg": JPEGS[2],
    }


def test_species(tmp_path: Path) -> None:
    root = write_files(tmp_path, files())
    train = opened(root, "inaturalist", split="train")
    assert labels(train) == {"train_val2019/Birds/40/a.jpg": 1, "train_val2019/Plants/3/b.jpg": 0}
    assert train.classes == ["Acer rubrum", "Bubo bubo"]
    test = opened(root, "inaturalist", split="test")
    assert labels(test) == {"test2019/c.jpg": -1} and test.classes is None


def test_labels_mean_the_same_in_all_splits(tmp_path: Path) -> None:
    image = {"id": 7, "file_name": "train_val2019/Birds/40/a.jpg"}
    val = {
        "categories": CATEGORIES[:1],
        "images": [image],
        "annotations": [{"id": 9, "image_id": 7, "category_id": 40}],
    }
    root = write_files(tmp_path, files() | {"val2019.json": text(val)})
    source = opened(root, "inaturalist", split="val")
    assert list(labels(source).values()) == [1]
    assert source.classes == ["Acer rubrum", "Bubo bubo"]
    val["categories"] = [*CATEGORIES, {"id": 50, "name": "Corvus"}]
    write_files(root, {"val2019.json": text(val)})
    message = r"val2019\.json: the training split lacks the category 50 \('Corvus'\)"
    refuses(message, root, split="val")


def test_the_full_list_is_taken_where_there_is_a_mini_one(tmp_path: Path) -> None:
    mini = text(content() | {"images": content()["images"][:1], "annotations": []})
    root = write_files(tmp_path, files() | {"train_mini.json": mini})
    assert len(open_source(root, split="train").items) == 2
    (root / TRAIN).unlink()
    assert len(open_source(root, split="train").items) == 1


def test_equal_names_stay_apart(tmp_path: Path) -> None:
    same = [{"id": number, "name": "3", "supercategory": "Birds"} for number in (3, 40)]
    root = write_files(tmp_path, files() | {TRAIN: text(content() | {"categories": same})})
    assert open_source(root, split="train").classes == ["3 (3)", "3 (40)"]
