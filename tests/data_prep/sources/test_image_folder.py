import io
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.encode.images import prepare_image
from data_prep.files.archives import DamagedItem
from data_prep.sources.registry import open_source
from data_prep.sources.source import Item, Source
from data_prep.splits import Split
from pospre.data.decode.decoder import DecodeError, decode_image
from pospre.data.opening import open_reader
from pospre.errors import UserError
from tests.data_prep.reading import run
from tests.data_prep.sample_images import encoded, picture, write_files
from tests.data_prep.sources.fakes import refuses

JPEG = encoded(picture())
VAL = Split("val", 0.3, 1)


def test_order_labels_and_ignored_files(tmp_path: Path) -> None:
    names = ["b/2.jpg", "b/10.jpg", "a/z/1.png", "a-x/1.jpg", "c/0.webp"]
    others = {"notes.txt": b"x", "a/list.csv": b"1,2", ".hidden/1.jpg": JPEG, "b/._2.jpg": b""}
    folder = open_source(write_files(tmp_path, dict.fromkeys(names, JPEG) | others))
    assert [item.name for item in folder.items] == sorted(names)
    assert folder.classes == ["a", "a-x", "b", "c"]
    for item in folder.items:
        assert folder.classes[item.label] == item.name.split("/")[0]
    assert folder.num_ignored == 2  # hidden ones do not count
    reader = open_reader(tmp_path)
    found = [reader.about(number) for number in range(len(reader))]
    assert found == [(item.label, item.name) for item in folder.items]


def test_linked_folders_are_followed_once_for_each_class(tmp_path: Path) -> None:
    write_files(tmp_path, {"outside/1.jpg": JPEG, "photos/a/1.jpg": JPEG})
    for name in ("b", "c", "a/out", "a/out-again"):
        (tmp_path / "photos" / name).symlink_to(tmp_path / "outside")
    (tmp_path / "photos/a/up").symlink_to(tmp_path / "photos")
    folder = open_source(tmp_path / "photos")
    assert [item.name for item in folder.items] == ["a/1.jpg", "a/out/1.jpg", "b/1.jpg", "c/1.jpg"]
    assert folder.classes == ["a", "b", "c"]
    skipped = "skipped links to folders that are already read (2): a/out-again and 1 more"
    assert folder.left_out == (skipped,)
    with pytest.warns(UserWarning, match=re.escape(skipped)):
        assert len(open_reader(tmp_path / "photos")) == 4


ADDED = ["@eaDir/x/SYNOPHOTO_THUMB_M.jpg", "#recycle/a.jpg", "$RECYCLE.BIN/S-1/a.jpg",
         "a/@eaDir/1.jpg/SYNOPHOTO_THUMB_XL.jpg", "a/@__thumb/1.jpg", "a/GOPR0001.THM",
         "b/1.jpg~", "b/2.jpg.crdownload", "System Volume Information/1.jpg"]  # fmt: skip


def nef(*, first: int = 1) -> bytes:
    """A TIFF whose first directory is a thumbnail (NewSubfileType 1), as cameras write."""
    buffer = io.BytesIO()
    picture().save(buffer, "TIFF", tiffinfo={254: first})
    return buffer.getvalue()


def test_what_others_add_to_a_folder_is_skipped_and_counted(tmp_path: Path) -> None:
    files = dict.fromkeys(["a/1.jpg", "b/1.jpg", *ADDED], JPEG)
    more = {"a/DSC_1.NEF": nef(), "a/DSC_2": nef(), "b/whole.tif": nef(first=0), "b/x.CR3": b"?"}
    with_raw = write_files(tmp_path, files | more | {"empty/notes.txt": b"x", "b/y.txt": b""})
    folder = open_source(with_raw)
    assert [item.name for item in folder.items] == ["a/1.jpg", "b/1.jpg", "b/whole.tif"]
    assert folder.classes == ["a", "b"] and folder.num_ignored == 5
    assert "a/DSC_1.NEF: a camera's raw file, which Pillow" in str(folder.ignored)
    assert folder.left_out == (
        "skipped what systems, editors or cameras add (9): #recycle and 8 more",
        "skipped pictures that Pillow cannot read (2): a/DSC_1.NEF and 1 more",
        "folders that are no classes, as they are empty or hold other files (1): empty",
    )
    with pytest.warns(UserWarning) as caught:
        reader = open_reader(with_raw)
    assert reader.classes == ["a", "b"] and list(reader.labels()) == [0, 1, 1]
    assert [str(warning.message) for warning in caught] == [
        f"{with_raw}: {line}" for line in folder.left_out
    ]
    with pytest.raises(DamagedItem, match="a camera's raw file"):
        prepare_image(nef(), None, 90)
    with pytest.raises(DecodeError, match="a camera's raw file"):
        decode_image(torch.frombuffer(bytearray(nef()), dtype=torch.uint8))


def test_a_stray_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_files(tmp_path / "in", dict.fromkeys(["a/1.jpg", "b/1.jpg", "top.png"], JPEG))
    said = "so these are no classes and all labels are -1 (1): top.png"
    with pytest.warns(UserWarning, match=re.escape(said)):
        reader = open_reader(root)
    assert reader.classes is None and [reader.read(n).label for n in range(3)] == [-1] * 3
    assert run(root, tmp_path / "out") == 0
    assert said in capsys.readouterr().out


def folder_of(names: list[str]) -> Source:
    items = tuple(Item(name, index % 3, 1, "1") for index, name in enumerate(names))
    return Source(Path("x"), items, ["a", "b", "c"])


@given(st.integers(0, 2**31), st.floats(0.2, 0.8))
@settings(max_examples=30)
def test_the_splits_are_complementary(seed: int, fraction: float) -> None:
    folder = folder_of([f"c/{number}.jpg" for number in range(200)])
    train = folder.drawn(Split("train", fraction, seed))
    val = folder.drawn(Split("val", fraction, seed))
    assert sorted(train.items + val.items, key=folder.items.index) == list(folder.items)
    assert train.classes == val.classes == folder.classes
    assert abs(len(val.items) / 200 - fraction) < 0.2


def test_removing_a_file_moves_no_other() -> None:
    names = [f"c/{number}.jpg" for number in range(100)]
    before = {item.name for item in folder_of(names).drawn(VAL).items}
    after = {item.name for item in folder_of(names[10:]).drawn(VAL).items}
    assert after == before - set(names[:10])


def test_splits_of_its_own(tmp_path: Path) -> None:
    names = ["train/ant/1.jpg", "train/bee/2.jpg", "validation/bee/3.jpg", "test/4.jpg"]
    root = write_files(tmp_path, dict.fromkeys(names, JPEG))
    refuses(r"has the splits .*train.*; choose one with --split", root)
    train, val, test = (open_source(root, split=split) for split in ("train", "val", "test"))
    assert [(item.name, item.label) for item in train.items] == [("ant/1.jpg", 0), ("bee/2.jpg", 1)]
    # a label means the same in all splits, even where a class has no image
    assert [(item.name, item.label) for item in val.items] == [("bee/3.jpg", 1)]
    assert train.classes == val.classes == ["ant", "bee"]
    assert [item.label for item in test.items] == [-1] and test.classes is None
    assert val.split_rule == "validation/" and val.read(val.items[0]) == JPEG
    write_files(tmp_path, {"validation/cow/5.jpg": JPEG})
    refuses(r"has the class cow, which the training split lacks", root, split="val")


@pytest.mark.parametrize(
    ("train", "val", "name"),
    [("Train", "VAL", ""), ("data/train", "data/val", "data/"), ("x/TRAIN_256", "x/Val", "x/")],
)
def test_splits_in_any_case_and_one_level_down(
    tmp_path: Path, train: str, val: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{split}/{label}/{split[-1]}.jpg": JPEG for split in (train, val) for label in "ab"}
    root = write_files(tmp_path / "in", files | {f"{name}stray.png": JPEG, "notes.txt": b"x"})
    source = open_source(root, split="train")
    assert [item.name for item in source.items] == [f"a/{train[-1]}.jpg", f"b/{train[-1]}.jpg"]
    assert source.classes == ["a", "b"] and source.root == root / train
    assert source.left_out == ("skipped images beside the splits (1): stray.png",)
    said = rf"{root} has splits of its own \(train, val\), .*: {root / train}\.$"
    with pytest.raises(UserError, match=said):
        open_reader(root)
    assert len(open_reader(root / train)) == 2
    assert run(root, tmp_path / "out", "--split", "val") == 0
    assert "warning: skipped images beside the splits" in capsys.readouterr().out


def test_splits_inside_one_of_several_folders(tmp_path: Path) -> None:
    names = ["photos/train/ant/1.jpg", "photos/val/ant/2.jpg", "masks/3.jpg", "train/4.jpg"]
    root = write_files(tmp_path, dict.fromkeys(names, JPEG))
    said = rf"{root}/photos has splits of its own \(train, val\), .*give {root}/photos, or"
    refuses(said, root, split="train")
    with pytest.raises(UserError, match=said):
        open_reader(root)


def test_classes_that_are_called_like_splits(tmp_path: Path) -> None:
    names = ["train/1.jpg", "plane/2.jpg", "test_tube/3.jpg"]
    source = open_source(write_files(tmp_path, dict.fromkeys(names, JPEG)))
    assert source.classes == open_reader(tmp_path).classes == ["plane", "test_tube", "train"]
