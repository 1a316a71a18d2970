"""What is said of data that cannot be learned from, before any forward pass."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pospre.evaluation.dense.detection import detection
from pospre.evaluation.dense.detection.box_data import open_boxes
from pospre.evaluation.dense.segmentation import segmentation
from pospre.evaluation.dense.video import video_segmentation
from tests.evaluation.dense.pictures import coco_folder, davis_folder, mask_folder, save, voc_folder
from tests.refusals import refuses

Run = Callable[..., dict[str, Any]]
A, M, J = "Annotations/val001.xml", "val/masks/001.png", "val/images/001.jpg"
V = "Annotations/480p/moving/00003.png"


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def grey(path: Path, *shape: int, value: int = 0) -> None:
    save(path, np.full(shape, value, np.uint8))


def with_id_9(path: Path) -> None:
    values = np.array(Image.open(path))
    values[3, 4] = 9
    save(path, values)


def without_boxes(folder: Path) -> None:
    for path in folder.glob("Annotations/val*.xml"):
        path.write_text("<annotation></annotation>")


def without_classes(folder: Path) -> None:
    for path in folder.glob("val/masks/*"):
        grey(path, 40, 48, value=255)


def shortened(folder: Path) -> None:
    for path in folder.rglob("0000[2-9].*"):
        path.unlink()


BOXES: list[Any] = [
    # words, and what is done to the data or given as settings
    (r"val001\.xml describes .*val001\.jpg, which does not exist",
     lambda d: (d / "JPEGImages/val001.jpg").unlink()),
    (r"JPEGImages has both val001\.jpg and val001\.png; images and labels belong together",
     lambda d: shutil.copy(d / "JPEGImages/val001.jpg", d / "JPEGImages/val001.png")),
    (r"val001\.xml has the class 'blue'; known are green, red",
     lambda d: edit(d / A, "green", "blue")),
    (r"val001\.xml, object 1, has no bndbox of four numbers; add it",
     lambda d: edit(d / A, "xmin", "left")),
    (r"val001\.xml, object 1, has no bndbox of four numbers; add it",
     lambda d: edit(d / A, "<xmin>", "<xmin>nan</xmin><xmin>")),
    (r"val001\.xml, object \d, has no name; add it, or remove the object",
     lambda d: edit(d / A, "green", " ")),
    (r"val001\.xml, object 1, has difficult '2'; write 1 or 0",
     lambda d: edit(d / A, "<bndbox>", "<difficult>2</difficult><bndbox>")),
    (r"val\.txt cannot be read \(it is not UTF-8 .*; save it as UTF-8",
     lambda d: (d / "ImageSets/Main/val.txt").write_bytes(b"caf\xe9\r\n")),
    (r"val001\.xml is not a readable annotation", lambda d: (d / A).write_text("<annotation>")),
    (r"\(val\) has no boxes", without_boxes),
    ("has no split 'test' of images with boxes; give a folder", {"split": "test"}),
    ("measured on training images", {"train_split": "val"}),
    (r"size=40 is not a multiple of 16; use 32", {"size": 40}),
]  # fmt: skip
MASKS: list[Any] = [
    (r"masks/001\.png contains the id 9; known are 0 to 2, and ignored 255",
     lambda d: with_id_9(d / M)),
    (r"001\.png is 10×10, but .*001\.jpg has another size", lambda d: grey(d / M, 10, 10)),
    (r"001\.jpg has no mask in .*val/masks; add it", lambda d: (d / M).unlink()),
    (r"001\.png is not the mask of any image", lambda d: (d / J).unlink()),
    (r"001\.png has 3 channels; a mask is a grey or indexed PNG", lambda d: grey(d / M, 40, 48, 3)),
    (r"001\.jpg is not a readable image", lambda d: (d / J).write_bytes(b"no image")),
    (r"classes\.txt has no class names; write one per line",
     lambda d: (d / "classes.txt").write_text("")),
    (r"classes\.txt has no name in line 2; write one per line",
     lambda d: (d / "classes.txt").write_text("sky\n\ncar\n\n")),
    ("names 2 classes, .* 2, and num_classes is 3",
     lambda d: (d / "classes.txt").write_text("sky\ncar\n"), {"num_classes": 3}),
    (r"no pixel of .*val has a class; check ignore", without_classes),
    (r"001\.jpg has 4×9 pixels after scaling, less than a patch of 8",
     lambda d: grey(d / J, 4, 9, 3)),
    ("has no split 'test' of images with masks; give a folder", {"split": "test"}),
    ("measured on training images", {"train_split": "val"}),
    ("crop=30 is not a multiple of the patch 8; use 32", {"crop": 30}),
    ("segmentation: layer 2, but the encoder has 1 blocks", {"layers": (1, 2)}),
    ("augment=false needs a frozen encoder", {"augment": False, "finetune": True}),
    (r"upernet takes four layers, not \[1\]", {"decoder": "upernet", "layers": (1,)}),
    ("upernet needs crops of two patches", {"decoder": "upernet", "crop": 8}),
]  # fmt: skip
VIDEOS: list[Any] = [
    ("has 5 frames and .*moving 4 masks; only one of them has 00003", lambda d: (d / V).unlink()),
    (r"moving has both 00003\.jpg and 00003\.png",
     lambda d: shutil.copy(d / V, (d / "JPEGImages/480p/moving/00003.png"))),
    (r"00003\.png contains the id 7; known from the first frame are 1, 2, and 255",
     lambda d: grey(d / V, 64, 80, value=7)),
    (r"the mask of .*00003\.jpg is 10×10, but the frame has another size",
     lambda d: grey(d / V, 10, 10, value=1)),
    ("moving: the first mask has no object to track",
     lambda d: grey((d / V).with_name("00000.png"), 64, 80)),
    (r"has no list ImageSets/2017/val\.txt beside JPEGImages and Annotations",
     lambda d: (d / "ImageSets/2017/val.txt").unlink()),
    ("moving has 2 frames; .* so a video needs at least 3", shortened),
    (r"00000\.jpg has 4×5 pixels after scaling, less than a patch of 8", {"size": 4}),
    ("multiple=60 is not a multiple of the patch size 8; use 64", {"multiple": 60}),
    ("multiple=64, but .*jpg are scaled to at most 40 pixels", {"size": 32, "multiple": 64}),
]  # fmt: skip
SPLITS = {"train": 2, "val": 2}
MAKE: dict[str, Callable[[Path], Path]] = {
    "detection": lambda folder: voc_folder(folder, SPLITS),
    "segmentation": lambda folder: mask_folder(folder, SPLITS),
    "video_segmentation": davis_folder,
}
ROWS = [
    (name, row) for name, rows in zip(MAKE, (BOXES, MASKS, VIDEOS), strict=True) for row in rows
]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_mistakes_are_said_before_any_forward_pass(
    measure: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: Any
) -> None:
    steps = (detection, "_train"), (segmentation, "_measure"), (video_segmentation, "follow")
    for module, step in steps:
        monkeypatch.setattr(module, step, lambda *_: pytest.fail("it began"))
    data, settings = MAKE[name](tmp_path), {}
    words, *wrong = row
    for each in wrong:
        if isinstance(each, dict):
            settings = each
        else:
            each(data)
    refuses(words, lambda: measure(name, data, **settings), tmp_path)


@pytest.mark.parametrize(
    ("words", "key", "change"),
    [
        ("annotation 1 has the category 4; known are 3, 7", "", {"category_id": 4}),
        ("annotation 1 is on the image 99, which is not listed", "", {"image_id": 99}),
        ("annotation 1 has no bbox of four numbers", "", {"bbox": [1, 2]}),
        ("annotation 1 has no bbox of four numbers", "", {"bbox": [1, 2, "nan", 3]}),
        ("annotation 1 has no bbox of four numbers", "", {"bbox": 5}),
        ("annotation 1 has iscrowd 'x'; write 1 or 0", "", {"iscrowd": "x"}),
        ("annotation 1 has a polygon of 7 numbers", "", {"segmentation": [[1, 1, 9, 1, 9, 9, 1]]}),
        ("annotation 1 has a polygon of 4 numbers", "", {"segmentation": [1, 1, 9, 9]}),
        (r"annotation 0, counted from 0, is not in COCO's format \(TypeError", "",
         {"category_id": [3]}),
        ("annotation 0, .*a mask of", "", {"segmentation": {"size": [4, 4], "counts": [0, 16]}}),
        ("annotation 0, counted from 0, is not in COCO's format", "", {"segmentation": "polygon"}),
        (r"annotation 0, counted from 0, is not in COCO's format \(AttributeError", "", None),
        (r"val2017\.json: the id 10 is twice in images; give each its own", "images", {"id": 10}),
        ("the id 3 is twice in categories; give each its own", "categories", {"id": 3}),
        ("category 9 has no name; add it", "categories", {"id": 9, "name": " "}),
        ("category 9 has no name; add it", "categories", {"id": 9, "name": None}),
        ("not a COCO .*NaN is not finite.*; correct it or export", "images", {"id": math.nan}),
    ],
)  # fmt: skip
def test_what_is_not_in_cocos_format(words: str, key: str, change: Any, tmp_path: Path) -> None:
    """The first annotation is changed, or a further entry of a list is."""
    path = coco_folder(tmp_path, {"val": 1}) / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    entries = content[key or "annotations"]
    changed = None if change is None else entries[0] | change
    if key:
        entries.append(changed)
    else:
        entries[0] = changed
    path.write_text(json.dumps(content))
    refuses(words, lambda: open_boxes(str(tmp_path), "val"), tmp_path)
