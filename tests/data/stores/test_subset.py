"""Some images of a data set: by share and seed, or by a list, in every storage format."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.stores.subset import SubsetReader, subset
from pospre.data.views.options import ViewGroup
from tests.data_prep.reading import converted
from tests.refusals import refuses

Images = Callable[..., Path]


def test_as_many_of_each_class_by_the_seed(image_folder: Images) -> None:
    reader = open_reader(image_folder(num_images=30, classes=("a", "b", "c")))
    chosen = [subset(reader, 0.2, None, seed) for seed in (0, 0, 1)]
    assert all(isinstance(part, SubsetReader) for part in chosen)
    found = [part.indices.tolist() for part in chosen]  # type: ignore[attr-defined]
    assert found[0] == found[1] != found[2] and found[0] == sorted(found[0])
    labels = [chosen[0].about(index)[0] for index in range(len(chosen[0]))]
    assert labels == [0, 0, 1, 1, 2, 2]
    assert chosen[0].classes == ["a", "b", "c"] and chosen[0].address == reader.address
    assert subset(reader, 1.0, None, 0) is reader
    assert len(subset(reader, 0.001, None, 0)) == 3  # one of each at least


def test_small_classes_give_all_they_have(image_folder: Images) -> None:
    image_folder(num_images=18, classes=("a",))
    reader = open_reader(image_folder(num_images=2, classes=("b",)))
    labels = [part.about(index)[0] for part in [subset(reader, 0.5, None, 0)] for index in range(7)]
    assert labels == [0] * 5 + [1] * 2


def test_formats_give_the_same_images(image_folder: Images, tmp_path: Path) -> None:
    folder = image_folder(num_images=12)
    (tmp_path / "list.txt").write_bytes("dog/0003.jpg\r\n0004.jpg\r\n".encode("utf-16"))
    batches = []
    for path in (folder, converted(folder, tmp_path / "mds")):
        for options in ({"label_fraction": 0.5}, {"labels": str(tmp_path / "list.txt")}):
            loader = build_loader(
                path, batch_size=2, views=[ViewGroup(size=16, crop="center")], num_workers=0,
                shuffle=False, **options,
            )  # fmt: skip
            assert loader.num_samples == (6 if "label_fraction" in options else 2)
            batches.append(next(iter(loader)))
    for one, other in ((0, 2), (1, 3)):
        assert np.array_equal(batches[one]["view/image"], batches[other]["view/image"])
    assert batches[1]["label"].tolist() == [0, 1]


def test_lists_that_do_not_fit_are_said(image_folder: Images, tmp_path: Path) -> None:
    reader = open_reader(image_folder(num_images=4))
    listed = tmp_path / "list.txt"
    listed.write_text("0001.jpg\nn01.JPEG\n")
    refuses(r"1 of its 2 files .* n01.JPEG, is not in", lambda: subset(reader, 1.0, str(listed), 0))
    listed.write_text("\n")
    refuses("is empty", lambda: subset(reader, 1.0, str(listed), 0))
    refuses("cannot be read", lambda: subset(reader, 1.0, str(tmp_path / "none.txt"), 0))
    refuses("both choose", lambda: subset(reader, 0.5, str(listed), 0))
    flat = open_reader(image_folder(num_images=4, classes=(), name="flat"))
    refuses("needs labels", lambda: subset(flat, 0.5, None, 0))
    for name in ("cat", "dog"):
        (reader.path / name / "same.jpg").write_bytes((reader.path / "cat/0000.jpg").read_bytes())
    listed.write_text("same.jpg")
    refuses("is in several folders", lambda: subset(open_reader(reader.path), 1.0, str(listed), 0))
