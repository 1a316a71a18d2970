import hashlib
from pathlib import Path

import pytest
from torchvision.datasets import imagenet

from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import (
    JPEGS,
    everything,
    gzipped,
    labels,
    opened,
    refuses,
    tar_bytes,
    text,
)
from tests.data_prep.sources.imagenet_meta import META

TRAIN, VAL, DEVKIT = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12")
WNIDS = ["n00000010", "n00000020", "n00000030"]
TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"


def train_tar() -> bytes:
    """Three classes in another order than the sorted one, two images each."""
    return tar_bytes(
        {
            f"{WNIDS[place]}.tar": tar_bytes(
                {f"{WNIDS[place]}_{number}.JPEG": JPEGS[2 * place + number] for number in (1, 0)}
            )
            for place in (2, 0, 1)
        }
    )


def val_images() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{place:08d}.JPEG": JPEGS[place + 3] for place in (1, 2, 3, 4)}


def devkit() -> dict[str, bytes]:
    """The numbers 1, 2, 3 are the third, the first and the second class."""
    return {f"{DEVKIT}/{TRUTH}": b"1\n2\n3\n3\n", f"{DEVKIT}/data/meta.mat": META}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the three archives; torchvision takes our small devkit for ImageNet's."""
    archive = gzipped(devkit())
    md5 = hashlib.md5(archive, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(imagenet.ARCHIVE_META, "devkit", (f"{DEVKIT}.tar.gz", md5))
    files = {TRAIN: train_tar(), VAL: tar_bytes(val_images()), f"{DEVKIT}.tar.gz": archive}
    return write_files(tmp_path / "imagenet", files)


IN_ORDER = [
    (f"{wnid}/{wnid}_{number}.JPEG", label, JPEGS[2 * label + number])
    for label, wnid in enumerate(WNIDS)
    for number in (0, 1)
]
VAL_LABELS = [2, 0, 1, 1]


def test_the_original_tars(root: Path) -> None:
    train = opened(root, "imagenet", split="train")
    assert everything(train) == IN_ORDER and train.classes == WNIDS
    val = opened(root, "imagenet", split="val")
    assert list(labels(val).values()) == VAL_LABELS and val.classes == WNIDS
    assert [data for _, _, data in everything(val)] == list(val_images().values())
    assert everything(opened(root / TRAIN, "imagenet")) == IN_ORDER
    assert labels(opened(root / VAL, "imagenet", split="val")) == labels(val)
    refuses(r"has no such split, only val", root / VAL, split="train")


def test_val_without_train(root: Path) -> None:
    (root / TRAIN).unlink()
    val = opened(root, "imagenet", split="val")
    assert list(labels(val).values()) == VAL_LABELS and val.classes == WNIDS


def test_kaggle(tmp_path: Path) -> None:
    folder = "ILSVRC/Data/CLS-LOC"
    files = {f"{folder}/train/{name}": data for name, _, data in IN_ORDER}
    files |= {f"{folder}/val/{name}": data for name, data in val_images().items()}
    rows = [f"ILSVRC2012_val_{place:08d},{WNIDS[label]} 1 2 3 4" for place, label in
            enumerate(VAL_LABELS, start=1)]  # fmt: skip
    files["LOC_val_solution.csv"] = text(["ImageId,PredictionString", *rows])
    root = write_files(tmp_path, files)
    train = opened(root, "imagenet", split="train")
    assert [(label, data) for _, label, data in everything(train)] == [
        (label, data) for _, label, data in IN_ORDER
    ]
    val = opened(root, "imagenet", split="val")
    assert list(labels(val).values()) == VAL_LABELS
    inside = opened(root / "ILSVRC", "imagenet", split="train")
    assert inside.classes == train.classes and len(inside.items) == len(train.items)
    for content in (b"a,b\n1,2\n", b"ImageId,PredictionString\n" + b"1" * 200_000):
        write_files(root, {"LOC_val_solution.csv": content})
        refuses(r"must have the columns ImageId and PredictionString", root, split="val")


def test_class_folders(tmp_path: Path) -> None:
    files = {f"train/{name}": data for name, _, data in IN_ORDER}
    root = write_files(tmp_path, files | {f"val/{WNIDS[1]}/a.JPEG": JPEGS[0]})
    assert labels(opened(root, "imagenet", split="val")) == {f"val/{WNIDS[1]}/a.JPEG": 1}
    write_files(root, {"val/n99999999/b.JPEG": JPEGS[1]})
    refuses(r"has the class n99999999, which train lacks", root, split="val")


def test_what_lies_beside_class_folders_is_no_class(tmp_path: Path) -> None:
    files = {f"train/{name}": data for name, _, data in IN_ORDER}
    files |= {f"val/{WNIDS[1]}/a.JPEG": JPEGS[0]}
    strays = ["README", "_old/a.JPEG", "checked/b.JPEG", "c.JPEG", "n00000005", "n0000001/d.JPEG"]
    files |= {f"{split}/{name}": JPEGS[0] for split in ("train", "val") for name in strays}
    root = write_files(tmp_path, files)
    assert labels(opened(root, "imagenet", split="val")) == {f"val/{WNIDS[1]}/a.JPEG": 1}
    train = opened(root, "imagenet", split="train")
    assert train.classes == WNIDS and train.num_ignored == len(strays)
    assert list(labels(train).values()) == [label for _, label, _ in IN_ORDER]


def test_no_labels_for_validation(root: Path) -> None:
    (root / VAL).write_bytes(tar_bytes(val_images() | {"ILSVRC2012_val_00000005.JPEG": JPEGS[0]}))
    refuses(r"the class of the validation image .*00000005", root, split="val")
    (root / f"{DEVKIT}.tar.gz").write_bytes(gzipped(devkit())[:-90])
    refuses(r"devkit_t12\.tar\.gz is not the file that ImageNet offers", root, split="val")
    (root / f"{DEVKIT}.tar.gz").unlink()
    refuses(r"put ILSVRC2012_devkit_t12\.tar\.gz .* beside them", root, split="val")


def test_damage_inside_of_a_class(root: Path) -> None:
    files = {f"{wnid}.tar": tar_bytes({f"{wnid}_0.JPEG": JPEGS[0]}) for wnid in WNIDS}
    cut = files[f"{WNIDS[1]}.tar"][:700]
    (root / TRAIN).write_bytes(tar_bytes({**files, f"{WNIDS[1]}.tar": cut}))
    refuses(r"a tar inside .*train\.tar .*n00000020_0\.JPEG is", root, split="train")
    (root / TRAIN).write_bytes(tar_bytes({"readme.txt": b"x"}))
    refuses(r"must hold a tar per class, but there is readme\.txt", root, split="train")
