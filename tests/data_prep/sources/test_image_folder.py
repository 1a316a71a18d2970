from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.registry import open_source
from data_prep.sources.source import Item, Source
from data_prep.splits import Split
from pospre.errors import UserError
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


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"outside/1.jpg": JPEG, "photos/a/1.jpg": JPEG})
    (tmp_path / "photos/b").symlink_to(tmp_path / "outside")
    (tmp_path / "photos/a/up").symlink_to(tmp_path / "photos")
    folder = open_source(tmp_path / "photos")
    assert [item.name for item in folder.items] == ["a/1.jpg", "b/1.jpg"]


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1.jpg": JPEG})
    first = open_source(tmp_path).fingerprint()
    assert open_source(tmp_path).fingerprint() == first
    write_files(tmp_path, {"a/2.jpg": JPEG})
    assert open_source(tmp_path).fingerprint() != first


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


def test_empty_split() -> None:
    with pytest.raises(UserError, match="leaves no sample"):
        folder_of(["a/1.jpg"]).drawn(Split("val", 1e-6))


def test_other_splits_are_not_drawn() -> None:
    with pytest.raises(UserError, match="--split test: x has no splits of its own"):
        folder_of(["a/1.jpg"]).drawn(Split("test"))


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


@pytest.mark.parametrize(("first", "second"), [("train", "train2"), ("val", "validation")])
def test_two_folders_of_one_split(tmp_path: Path, first: str, second: str) -> None:
    names = [f"{split}/ant/{split}.jpg" for split in {"train", "val", first, second}]
    root = write_files(tmp_path, dict.fromkeys(names, JPEG))
    for split in ("train", "val"):
        message = rf"({first} and {second}|{second} and {first}) are both the split {first}"
        refuses(message, root, split=split)


def test_classes_that_are_called_like_splits(tmp_path: Path) -> None:
    names = ["train/1.jpg", "plane/2.jpg", "test_tube/3.jpg"]
    source = open_source(write_files(tmp_path, dict.fromkeys(names, JPEG)))
    assert source.classes == ["plane", "test_tube", "train"]


def test_a_folder_beside_splits_does_not_make_them_classes(tmp_path: Path) -> None:
    names = ["train/ant/1.jpg", "extra/ant/2.jpg", "validation/ant/3.jpg"]
    root = write_files(tmp_path, dict.fromkeys(names, JPEG))
    for split in ("train", "val", None):
        refuses(r"has splits \(train, val\), but extra is not one; move it", root, split=split)


@pytest.mark.parametrize("name", ["photos.beton", "photos_mds"])
def test_a_converted_data_set_is_no_source(tmp_path: Path, name: str) -> None:
    inside = name if name.endswith(".beton") else f"{name}/shard.00000.mds"
    write_files(tmp_path, {inside: b"x"})
    refuses(rf"{name} is a .* train on it directly \(data.path=", tmp_path / name)
