from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.sources.registry import open_source
from tests.data_prep.sample_images import encoded, picture, write_files
from tests.data_prep.sources.fakes import everything, labels, opened, text

PNGS = [encoded(picture(number, 60, 40), "PNG") for number in range(4)]
SCENES = "scenes/CLEVR_train_scenes.json"


def scene(number: int, count: int, split: str = "train") -> dict[str, Any]:
    thing = {
        "color": "brown", "shape": "cylinder", "size": "large", "material": "rubber",
        "rotation": 269.8, "3d_coords": [0.1, -2.5, 0.7], "pixel_coords": [30, 20, 9.5],
    }  # fmt: skip
    return {
        "image_index": number,
        "image_filename": f"CLEVR_{split}_{number:06d}.png",
        "split": split,
        "objects": [thing] * count,
        "relationships": {"left": [[]] * count},
        "directions": {"left": [-0.66, -0.75, 0.0]},
    }


def files() -> dict[str, bytes]:
    return {
        SCENES: text({"info": {}, "scenes": [scene(1, 3), scene(0, 5)]}),
        "scenes/CLEVR_val_scenes.json": text({"scenes": [scene(0, 0, "val")]}),
        "images/train/CLEVR_train_000000.png": PNGS[0],
        "images/train/CLEVR_train_000001.png": PNGS[1],
        "images/val/CLEVR_val_000000.png": PNGS[2],
        "images/test/CLEVR_test_000000.png": PNGS[3],
        "questions/CLEVR_train_questions.json": b"{}",
    }


def test_counts(tmp_path: Path) -> None:
    root = write_files(tmp_path / "CLEVR_v1.0", files())
    train = opened(root, "clevr", split="train")
    assert everything(train) == [
        ("train/CLEVR_train_000000.png", 5, PNGS[0]),
        ("train/CLEVR_train_000001.png", 3, PNGS[1]),
    ]
    assert train.classes == [str(count) for count in range(11)]
    val = opened(root, "clevr", split="val")
    assert labels(val) == {"val/CLEVR_val_000000.png": 0} and val.classes == train.classes
    test = opened(root, "clevr", split="test")
    assert labels(test) == {"test/CLEVR_test_000000.png": -1}


@pytest.mark.parametrize(
    ("depths", "label"), [((9.5, 12.0), 3), ((8.0,), 0), ((8.01, 99.0), 1), ((14.2,), 5), ((), -1)]
)
def test_distance_of_the_nearest_object(
    tmp_path: Path, depths: tuple[float, ...], label: int
) -> None:
    """The benchmark's label: the last border that lies below the least depth."""
    one = scene(0, len(depths))
    one["objects"] = [{"pixel_coords": [30, 20, depth]} for depth in depths]
    content = {**files(), SCENES: text({"scenes": [one]})}
    root = write_files(tmp_path, content)
    source = open_source(root, kind="clevr_distance", split="train")
    assert [item.label for item in source.items] == [label]
    if depths:
        borders = np.array([0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0])
        assert np.flatnonzero(borders - min(depths) < 0).max() == label
    assert source.classes is not None and source.classes[3] == "9 to 9.5"
