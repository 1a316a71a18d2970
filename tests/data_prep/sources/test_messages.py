"""What is said of folders and archives that are no source, and nothing is written there."""

from pathlib import Path
from typing import Any

import pytest

from data_prep.splits import Split
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources import test_ade20k as ade20k
from tests.data_prep.sources import test_clevr as clevr
from tests.data_prep.sources import test_coco as coco
from tests.data_prep.sources import test_davis as davis
from tests.data_prep.sources import test_inaturalist as inat
from tests.data_prep.sources import test_parquet as parquet
from tests.data_prep.sources import test_tiny_imagenet as tiny
from tests.data_prep.sources.fakes import JPEGS, refuses, tar_bytes, text
from tests.data_prep.sources.test_image_folder import folder_of
from tests.data_prep.sources.test_parquet import images
from tests.data_prep.sources.test_webdataset import shard
from tests.refusals import refuses as refused

JPEG = JPEGS[0]
TRAIN, VAL = {"split": "train"}, {"split": "val"}
EACH: Any = TRAIN, VAL, {}
TAR: Any = {"path": "one.tar", "kind": "webdataset"}
TWICE = [{"file_name": "a/1.jpg", "width": 4, "height": 4, "id": number} for number in (1, 2)]
BIRDS = {f"birds-{split}-000000.tar": shard(5, 6) for split in ("train", "val")}
CUT = {"birds-train-000001.tar": shard(3, 4)[:2000]}
SPLITS = {"train/ant/1.jpg": JPEG, "extra/ant/2.jpg": JPEG, "validation/ant/3.jpg": JPEG}
WNID = {tiny.VAL: b"val_0.JPEG\tn07\t0\n"}
YAK = {"ImageSets/2017/val.txt": b"cow\nyak\n"}
NO_LISTS = {name: None for name in davis.files() if name.startswith("ImageSets")}
NO_VIDEOS: Any = NO_LISTS | {"ImageSets/2017/a.txt": b""}
ALONE = {coco.TRAIN: text(coco.content()), "readme.md": b"x"}
TWO_YEARS = {"annotations/instances_train2014.json": b"{}"}
TWO_KINDS = {"annotations/instances_train.json": b"{}", "train.json": b"{}", "a/1.jpg": JPEG}
NO_FIELDS = {clevr.SCENES: b'{"scenes": [{"objects": []}]}'}


def ambiguous(first: str, second: str) -> dict[str, bytes]:
    return {f"{split}/ant/{split}.jpg": JPEG for split in ("train", "val", first, second)}


def packed(**files: bytes) -> dict[str, bytes]:
    return {"one.tar": tar_bytes({name.replace("_", "."): data for name, data in files.items()})}


def changed(module: Any, **changes: Any) -> dict[str, bytes]:
    return module.files() | {module.TRAIN: text(module.content() | changes)}


NOTED = inat.content()["annotations"]
SECOND, OTHER = ({"image_id": 1, "category_id": number} for number in (40, 9))
KEPT = ade20k.files(), clevr.files(), coco.files(), davis.files(), inat.files(), tiny.files()
ADE, CLEVR, COCO, DAVIS, INAT, TINY = KEPT

ROWS: list[tuple[Any, ...]] = [
    # words; files, without those that are None; how it is opened (one way or several)
    ("--source cocoo: there is no such kind. Did you mean 'co", {}, {"kind": "cocoo"}),
    ("nowhere does not exist", {}, {"path": "nowhere", "kind": "coco"}),
    (r"file\.bin is a file of no known kind", {"file.bin": b"x"}, {"path": "file.bin"}),
    ("may be coco or inaturalist; choose with --source", TWO_KINDS, {}),
    (r"a/1\.jpg is listed twice", {"train.json": text({"categories": [], "annotations": [],
                                   "images": TWICE}), "a/1.jpg": JPEG}, {}),
    (r"photos.beton is a .* train on it directly \(data.path=", {"photos.beton": b"x"},
     {"path": "photos.beton"}),
    (r"photos is a .* train on it directly \(data.path=", {"photos/shard.00000.mds": b"x"},
     {"path": "photos"}),
    ("(train and train2|train2 and train) are both the split train",
     ambiguous("train", "train2"), (TRAIN, VAL)),
    ("(val and validation|validation and val) are both the split val",
     ambiguous("val", "validation"), (TRAIN, VAL)),
    (r"has splits \(train, val\), but extra is not one; move it", SPLITS, EACH),
    ("has no WAV files", {"a.jpg": JPEG}, {"kind": "audio_folder"}),
    (r"sceneCategories\.txt does not list ADE_val_9",
     ADE | {"images/validation/ADE_val_9.jpg": JPEG}, VAL),
    ("an image and its scene per line, but one is 'ADE_train",
     ADE | {ade20k.SCENES: b"ADE_train_1\n"}, TRAIN),
    (r"sceneCategories\.txt .* is missing; found annotations", ADE | {ade20k.SCENES: None}, TRAIN),
    ("must hold an object, not a list", CLEVR | {clevr.SCENES: b"[1]"}, TRAIN),
    (r"CLEVR_train_scenes\.json \(the scenes\) is not JSON",
     CLEVR | {clevr.SCENES: b"{cut"}, TRAIN),
    ("has no list 'scenes'", CLEVR | {clevr.SCENES: b"{}"}, TRAIN),
    (r"a scene of .* with image_filename and objects \(KeyError: 'image_filename",
     CLEVR | NO_FIELDS, TRAIN),
    (r"is missing; found CLEVR_val_scenes\.json", CLEVR | {clevr.SCENES: None}, TRAIN),
    ("no images/train", {clevr.SCENES: b"{}"}, {"kind": "clevr", **TRAIN}),
    (r"instances_train2017\.json .* is not JSON", COCO | {coco.TRAIN: b"{"}, TRAIN),
    (r"nested too deeply", COCO | {coco.TRAIN: b"[" * 100_000}, TRAIN),
    ("is not as expected.*in COCO.*'images'",
     COCO | {coco.TRAIN: text({"annotations": []})}, TRAIN),
    ("is not as expected.*'file_name'", changed(coco, images=[{"id": 9}]), TRAIN),
    (r"instances_train2017\.json has no sample of the kind coco", changed(coco, images=[]), TRAIN),
    ("is not as expected", changed(coco, images=[3]), TRAIN),
    ("annotations/instances_.* needs a folder or zip train2017", ALONE, {}),
    ("there is no annotations/instances_<train", {"train2017/1.jpg": JPEG}, {"kind": "coco"}),
    (r"has .*_train2014\.json and .*_train2017\.json; move all", ALONE | TWO_YEARS, {}),
    (r"val\.txt lists the video yak, but JPEGImages/480p", DAVIS | YAK, VAL),
    (r"there is no ImageSets/2017/val\.txt", DAVIS | NO_VIDEOS, VAL),
    ("the folder JPEGImages is missing", {"a.jpg": JPEG}, {"kind": "davis"}),
    (r"train2019\.json .* is not JSON", INAT | {inat.TRAIN: b"no"}, TRAIN),
    ("is not as expected.*'images'", INAT | {inat.TRAIN: b"{}"}, TRAIN),
    ("image 1 has the category 9", changed(inat, annotations=[OTHER]), TRAIN),
    ("image 1 has two categories", changed(inat, annotations=[*NOTED, SECOND]), TRAIN),
    (r"Birds/40/a\.jpg has no annotation", changed(inat, annotations=NOTED[:1]), TRAIN),
    (r"train2019\.json has no sample", changed(inat, images=[], annotations=[]), TRAIN),
    (r"there is no train\.json or val\.json", {"a/1.jpg": JPEG}, {"kind": "inaturalist"}),
    ("has the splits train, val, test; choose one with", TINY, {}),
    (r"val_annotations\.txt .* is missing; found images\.", TINY | {tiny.VAL: None}, VAL),
    (r"val_0\.JPEG has the class n07", TINY | WNID, VAL),
    (r"sample a has an invalid \.json", packed(a_jpg=JPEG, a_json=b"{cut"), TAR),
    (r"an invalid \.json: it is nested", packed(a_jpg=JPEG, a_json=b"[" * 100_000), TAR),
    (r"sample a has a \.json that is not an object", packed(a_jpg=JPEG, a_json=b"[1]"), TAR),
    (r"its label is \[1\], not a number", packed(a_jpg=JPEG, a_json=text({"label": [1]})), TAR),
    ("labels go from 123456789 to", packed(a_jpg=JPEG, a_cls=b"123456789"), TAR),
    ("must be all whole numbers or all names",
     packed(a_jpg=JPEG, a_cls=b"1", b_jpg=JPEG, b_cls=b"1" * 5000), TAR),
    (r"one\.tar has a\.JPG twice", packed(a_jpg=JPEG, a_JPG=JPEG), TAR),
    ("has no sample of the kind webdataset", packed(a_txt=b"x", a_cls=b"1"), TAR),
    ("is a file of no known kind", {"a.tar": tar_bytes({"cat/1.jpg": JPEG, "cat/2.jpg": JPEG})},
     {"path": "a.tar"}),
    (r"birds-train-000001\.tar is damaged or not a tar: .*cut off", BIRDS | CUT, TRAIN),
    (r"has no \.tar file", {"notes.txt": b"x"}, {"kind": "webdataset"}),
    (r"birds-train-0+\.tar contains its split \(train, val.*"
     r"that of birds-extra-0\.tar does not; rename", BIRDS | {"birds-extra-0.tar": shard(7)}, EACH),
]  # fmt: skip


@pytest.mark.parametrize(("words", "files", "ways"), ROWS)
def test_what_is_no_source_is_refused(words: str, files: Any, ways: Any, tmp_path: Path) -> None:
    write_files(tmp_path, {name: data for name, data in files.items() if data is not None})
    for way in [ways] if isinstance(ways, dict) else ways:
        options = {**way}
        refuses(words, tmp_path / options.pop("path", ""), **options)
        if way is TAR:
            refuses(words, tmp_path / "one.tar", kind="webdataset", split="train")


@pytest.mark.parametrize(
    ("words", "columns", "names"),
    [
        (r"no column of images \(image, .*\); its columns are pixels", {"pixels": [1]}, None),
        ("row 0 has the label 3, but there are 3", {"image": images(0), "label": [3]},
         parquet.NAMES),
        ("labels go from -2 to -2", {"image": images(0), "label": [-2]}, None),
        (r"whole numbers or all names, not 0\.5", {"image": images(0), "label": [0.5]}, None),
        ("whole numbers or names.*list", {"image": images(0), "label": [[1, 2]]}, None),
        ("has no sample of the kind parquet", {"image": []}, None),
    ],
)  # fmt: skip
def test_tables_of_other_columns_are_refused(
    words: str, columns: Any, names: Any, tmp_path: Path
) -> None:
    refuses(words, parquet.write(tmp_path / "a.parquet", columns, names))


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ("leaves no sample", Split("val", 1e-6)),
        ("--split test: x has no splits of its own", Split("test")),
    ],
)
def test_splits_that_cannot_be_drawn_are_refused(words: str, split: Split) -> None:
    refused(words, lambda: folder_of(["a/1.jpg"]).drawn(split))
