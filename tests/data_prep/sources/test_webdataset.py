from pathlib import Path

import pytest

from data_prep.splits import Split
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, everything, labels, opened, tar_bytes, text


def shard(*numbers: int, folder: str = "", label: int | None = None) -> bytes:
    """A tar of samples whose class is their number modulo 3, unless another is given."""
    files: dict[str, bytes] = {}
    for number in numbers:
        stem = f"{folder}{number:04d}"
        about = {"caption": "x", "cls": number % 3} if label is None else {"cls": label}
        written = f"{number % 3 if label is None else label}\r\n"
        files[f"{stem}.cls"] = written.encode(("ascii", "utf-8-sig", "utf-16")[number % 3])
        files[f"{stem}.JPG"] = JPEGS[number]
        files[f"{stem}.json"] = text(about)
        files[f"{stem}.seg.png"] = b"no image of its own"
    return tar_bytes(files | {"readme.txt": b"x"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_files(
        tmp_path / "birds",
        {
            "birds-train-000000.tar": shard(0, 1, 2),
            "birds-train-000001.tar": shard(3, 4, folder="./deep/"),
            "birds-val-000000.tar": shard(5, 6),
            "notes.txt": b"x",
        },
    )


def test_samples_and_splits(root: Path) -> None:
    train = opened(root, "webdataset", split="train")
    assert everything(train) == [
        ("birds-train-000000.tar/0000.jpg", 0, JPEGS[0]),
        ("birds-train-000000.tar/0001.jpg", 1, JPEGS[1]),
        ("birds-train-000000.tar/0002.jpg", 2, JPEGS[2]),
        ("birds-train-000001.tar/deep/0003.jpg", 0, JPEGS[3]),
        ("birds-train-000001.tar/deep/0004.jpg", 1, JPEGS[4]),
    ]
    assert train.classes == ["0", "1", "2"] and train.num_ignored == 7  # masks and notes
    assert train.ignored == (
        "birds-train-000000.tar/0000.seg.png",
        "birds-train-000000.tar/readme.txt",
    )
    assert list(labels(opened(root, "webdataset", split="val")).values()) == [2, 0]


def one(tmp_path: Path, files: dict[str, bytes]) -> Path:
    return write_files(tmp_path, {"one.tar": tar_bytes(files)}) / "one.tar"


def test_labels_from_json_and_names(tmp_path: Path) -> None:
    files = {
        "a.jpg": JPEGS[0], "a.json": text({"label": "yak"}),
        "b.png": JPEGS[1], "b.json": text({"label": "ant"}),
        "c.jpeg": JPEGS[2],
    }  # fmt: skip
    source = opened(one(tmp_path, files), "webdataset")
    assert source.classes == ["ant", "yak"]
    assert labels(source) == {"one.tar/a.jpg": 1, "one.tar/b.png": 0, "one.tar/c.jpeg": -1}
    drawn = [source.drawn(Split(split, 0.5, seed=4)) for split in ("train", "val")]
    assert sum(len(each.items) for each in drawn) == 3
