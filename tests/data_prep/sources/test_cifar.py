import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from data_prep.sources.registry import open_source
from tests.data_prep.sample_images import picture, write_files
from tests.data_prep.sources.fakes import labels, opened, refuses, tar_bytes, text

TEN, HUNDRED = ["airplane", "cat"], [f"fine{number:02d}" for number in range(12)]
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def planes(number: int) -> np.ndarray:
    return np.asarray(picture(number, 32, 32)).transpose(2, 0, 1)


def record(number: int, *label: int) -> bytes:
    return bytes(label) + planes(number).tobytes()


def binary_ten() -> dict[str, bytes]:
    files = {
        f"{name}.bin": record(2 * place, place % 2) + record(2 * place + 1, 1)
        for place, name in enumerate(BATCHES)
    }
    return files | {"batches.meta.txt": text([*TEN, ""]), "readme.html": b"x"}


def binary_hundred() -> dict[str, bytes]:
    return {
        "train.bin": record(0, 3, 11) + record(1, 1, 4),
        "test.bin": record(2, 0, 7),
        "fine_label_names.txt": text(HUNDRED),
        "coarse_label_names.txt": b"fish\n",
    }


def batch(numbers: list[int], key: str, found: list[int]) -> bytes:
    data = np.stack([planes(number).ravel() for number in numbers])
    return pickle.dumps({"data": data, key: found}, protocol=2)


def pickled_ten() -> dict[str, bytes]:
    files = {
        name: batch([2 * place, 2 * place + 1], "labels", [place % 2, 1])
        for place, name in enumerate(BATCHES)
    }
    return files | {"batches.meta": pickle.dumps({"label_names": TEN}, protocol=2)}


def pickled_hundred() -> dict[str, bytes]:
    return {
        "train": batch([0, 1], "fine_labels", [11, 4]),
        "test": batch([2], "fine_labels", [7]),
        "meta": pickle.dumps({"fine_label_names": HUNDRED, "coarse_label_names": []}, protocol=2),
    }


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torchvision take our small files for CIFAR's."""
    for kind, files in ((CIFAR10, pickled_ten()), (CIFAR100, pickled_hundred())):
        entries = [
            (name, hashlib.md5(data, usedforsecurity=False).hexdigest())
            for name, data in files.items()
        ]
        *batches, test, meta = entries
        monkeypatch.setattr(kind, "train_list", batches)
        monkeypatch.setattr(kind, "test_list", [test])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "filename": meta[0], "md5": meta[1]})


def as_folder(root: Path, files: dict[str, bytes]) -> Path:
    return write_files(root / "batches", files)


def as_archive(root: Path, files: dict[str, bytes]) -> Path:
    path = root / f"cifar-{'100' if len(files) < 6 else '10'}-any.tar.gz"
    inside = tar_bytes({f"cifar-any/{name}": data for name, data in files.items()})
    with tarfile.open(path, "w:gz") as packed, tarfile.open(fileobj=io.BytesIO(inside)) as plain:
        for member in plain:
            packed.addfile(member, plain.extractfile(member))
    return path


@pytest.mark.parametrize("pack", [as_folder, as_archive])
@pytest.mark.parametrize("files", [binary_ten, pickled_ten])
def test_ten(tmp_path: Path, pack: Callable[..., Path], files: Callable[..., dict]) -> None:
    root = pack(tmp_path, files())
    train = opened(root, "cifar", split="train")
    assert train.classes == TEN and len(train.items) == 10
    assert list(labels(train).items())[:3] == [
        ("data_batch_1/00000.jpg", 0),
        ("data_batch_1/00001.jpg", 1),
        ("data_batch_2/00000.jpg", 1),
    ]
    for number, item in enumerate(train.items):
        image = Image.open(io.BytesIO(train.read(item)))
        wanted = planes(number).transpose(1, 2, 0).astype(int)
        assert image.format == "JPEG" and np.abs(np.asarray(image) - wanted).max() <= 4
    val, test = (opened(root, "cifar", split=split) for split in ("val", "test"))
    assert labels(val) == labels(test) == {"test_batch/00000.jpg": 1, "test_batch/00001.jpg": 1}


@pytest.mark.parametrize("pack", [as_folder, as_archive])
@pytest.mark.parametrize("files", [binary_hundred, pickled_hundred])
def test_hundred(tmp_path: Path, pack: Callable[..., Path], files: Callable[..., dict]) -> None:
    train = opened(pack(tmp_path, files()), "cifar", split="train")
    assert labels(train) == {"train/00000.jpg": 11, "train/00001.jpg": 4}
    assert train.classes == HUNDRED and train.items[1].location == planes(1).tobytes()


@pytest.mark.parametrize(("kind", "files"), [(CIFAR10, pickled_ten), (CIFAR100, pickled_hundred)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_images_and_labels_of_torchvision(
    tmp_path: Path, kind: type[CIFAR10], files: Callable[..., dict], split: str
) -> None:
    root = write_files(tmp_path / kind.base_folder, files())
    theirs, ours = kind(tmp_path, train=split == "train"), open_source(root, split=split)
    assert ours.classes == theirs.classes and list(labels(ours).values()) == theirs.targets
    stored = [np.frombuffer(item.location, np.uint8).reshape(3, 32, 32) for item in ours.items]
    assert np.array_equal(np.stack(stored).transpose(0, 2, 3, 1), theirs.data)


class Harm:
    """What a pickle can do: call a function."""

    def __reduce__(self) -> tuple:
        return print, ("harm",)


@pytest.mark.parametrize("name", ["test_batch", "batches.meta"])
def test_a_pickle_of_others_is_not_opened(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = as_folder(tmp_path, pickled_ten() | {name: pickle.dumps(Harm())})
    refuses(rf"{name} is not the file .* use the binary version", root, split="test")
    assert "harm" not in capsys.readouterr().out


def test_what_is_cut_off_or_missing(tmp_path: Path) -> None:
    archive = as_archive(tmp_path, binary_ten())
    archive.write_bytes(archive.read_bytes()[:-2000])
    refuses(r"cifar-10-any\.tar\.gz is damaged or not a tar", archive, split="train")
    root = as_folder(tmp_path, binary_ten())
    (root / "test_batch.bin").write_bytes(record(0, 7))
    refuses(r"test_batch has the label 7 at 0, but there are 2 cl", root, split="test")
    (root / "data_batch_2.bin").write_bytes(record(0, 1)[:-1])
    refuses(r"data_batch_2\.bin has 3072 bytes, which is no multiple", root, split="train")
    (root / "data_batch_2.bin").unlink()
    refuses(r"only data_batch_1, data_batch_3", root, split="train")
    (root / "batches.meta.txt").unlink()
    refuses(r"the class names .* are missing", root, split="train")
