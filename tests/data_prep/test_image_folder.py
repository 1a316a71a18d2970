from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.sources.image_folder import ImageFile, ImageFolder, list_image_folder, select_split
from pospre.errors import UserError
from tests.data_prep.sample_images import encoded, picture, write_files

JPEG = encoded(picture())


def test_order_labels_and_ignored_files(tmp_path: Path) -> None:
    names = ["b/2.jpg", "b/10.jpg", "a/z/1.png", "a-x/1.jpg", "c/0.webp"]
    others = {"notes.txt": b"x", "a/list.csv": b"1,2", ".hidden/1.jpg": JPEG, "b/._2.jpg": b""}
    folder = list_image_folder(write_files(tmp_path, dict.fromkeys(names, JPEG) | others))
    assert [file.path for file in folder.files] == sorted(names)
    assert folder.classes == ["a", "a-x", "b", "c"]
    for file in folder.files:
        assert folder.classes[file.label] == file.path.split("/")[0]
    assert folder.num_ignored == 4


def test_an_image_at_the_root_means_no_classes(tmp_path: Path) -> None:
    folder = list_image_folder(write_files(tmp_path, {"a/1.jpg": JPEG, "2.jpg": JPEG}))
    assert folder.classes is None
    assert {file.label for file in folder.files} == {-1}


def test_content_decides_where_the_name_says_nothing(tmp_path: Path) -> None:
    files = {"photo": JPEG, "photo.bak": encoded(picture(), "PNG"), "text": b"hello"}
    folder = list_image_folder(write_files(tmp_path, files))
    assert [file.path for file in folder.files] == ["photo", "photo.bak"]


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"outside/1.jpg": JPEG, "photos/a/1.jpg": JPEG})
    (tmp_path / "photos/b").symlink_to(tmp_path / "outside")
    (tmp_path / "photos/a/up").symlink_to(tmp_path / "photos")
    folder = list_image_folder(tmp_path / "photos")
    assert [file.path for file in folder.files] == ["a/1.jpg", "b/1.jpg"]


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1.jpg": JPEG})
    first = list_image_folder(tmp_path).fingerprint()
    assert list_image_folder(tmp_path).fingerprint() == first
    write_files(tmp_path, {"a/2.jpg": JPEG})
    assert list_image_folder(tmp_path).fingerprint() != first


@pytest.mark.parametrize("files", [{}, {"readme.txt": b"x"}])
def test_folder_without_images(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(UserError, match="holds no image"):
        list_image_folder(write_files(tmp_path, files))


def test_missing_folder_and_file_instead(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list_image_folder(tmp_path / "missing")
    (tmp_path / "file").write_bytes(JPEG)
    with pytest.raises(UserError, match="is a file"):
        list_image_folder(tmp_path / "file")


def folder_of(names: list[str]) -> ImageFolder:
    files = tuple(ImageFile(name, index % 3, 1, 1) for index, name in enumerate(names))
    return ImageFolder(Path("x"), files, ["a", "b", "c"], 0)


@given(st.integers(0, 2**31), st.floats(0.2, 0.8))
@settings(max_examples=30, deadline=None)
def test_the_parts_are_complementary(seed: int, fraction: float) -> None:
    folder = folder_of([f"c/{number}.jpg" for number in range(200)])
    train = select_split(folder, "train", fraction, seed)
    val = select_split(folder, "val", fraction, seed)
    assert sorted(train.files + val.files, key=folder.files.index) == list(folder.files)
    assert train.classes == val.classes == folder.classes
    assert abs(len(val.files) / 200 - fraction) < 0.2


def test_removing_a_file_moves_no_other() -> None:
    names = [f"c/{number}.jpg" for number in range(100)]
    before = {file.path for file in select_split(folder_of(names), "val", 0.3, 1).files}
    after = {file.path for file in select_split(folder_of(names[10:]), "val", 0.3, 1).files}
    assert after == before - set(names[:10])


def test_empty_part() -> None:
    with pytest.raises(UserError, match="leaves no image"):
        select_split(folder_of(["a/1.jpg"]), "val", 1e-6, 0)
