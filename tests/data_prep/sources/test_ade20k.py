from pathlib import Path

from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, labels, opened, text

SCENES = "sceneCategories.txt"


def files() -> dict[str, bytes]:
    found = {
        SCENES: text(["ADE_train_1 street", "ADE_train_2 attic", "ADE_val_1 street"]),
        "objectInfo150.txt": b"Idx\tRatio\n",
        "images/training/notes.txt": b"x",
    }
    for number, name in enumerate(
        ("training/ADE_train_1", "training/ADE_train_2", "validation/ADE_val_1")
    ):
        found[f"images/{name}.jpg"] = JPEGS[number]
        found[f"annotations/{name}.png"] = b"a mask"
    return found


def test_scenes(tmp_path: Path) -> None:
    root = write_files(tmp_path / "ADEChallengeData2016", files())
    train = opened(root, "ade20k", split="train")
    assert labels(train) == {"training/ADE_train_1.jpg": 1, "training/ADE_train_2.jpg": 0}
    assert train.classes == ["attic", "street"]
    assert train.num_ignored == 1
    val = opened(root, "ade20k", split="val")
    assert labels(val) == {"validation/ADE_val_1.jpg": 1} and val.classes == train.classes
