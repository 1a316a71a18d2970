import hashlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from data_prep.sources.cifar import Pixels
from tests.data_prep.sample_images import picture, write_files
from tests.data_prep.sources.fakes import gzipped, labels, opened, refuses

TEN, HUNDRED = ["airplane", "cat"], [f"fine{number:02d}" for number in range(12)]
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def pixels(number: int) -> np.ndarray:
    return np.asarray(picture(number, 32, 32))


def batch(numbers: list[int], key: str, found: list[int]) -> bytes:
    data = np.stack([pixels(number).transpose(2, 0, 1).ravel() for number in numbers])
    return pickle.dumps({"data": data, key: found}, protocol=2)


def ten() -> dict[str, bytes]:
    files = {
        name: batch([2 * place, 2 * place + 1], "labels", [place % 2, 1])
        for place, name in enumerate(BATCHES)
    }
    return files | {"batches.meta": pickle.dumps({"label_names": TEN}, protocol=2)}


def hundred() -> dict[str, bytes]:
    return {
        "train": batch([0, 1], "fine_labels", [11, 4]),
        "test": batch([2], "fine_labels", [7]),
        "meta": pickle.dumps({"fine_label_names": HUNDRED, "coarse_label_names": []}, protocol=2),
    }


def packed(kind: type[CIFAR10], files: dict[str, bytes]) -> bytes:
    return gzipped({f"{kind.base_folder}/{name}": data for name, data in files.items()})


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torchvision take our small files for CIFAR's."""
    for kind, files in ((CIFAR10, ten()), (CIFAR100, hundred())):
        *batches, test, meta = [(name, md5(data)) for name, data in files.items()]
        monkeypatch.setattr(kind, "train_list", batches)
        monkeypatch.setattr(kind, "test_list", [test])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "filename": meta[0], "md5": meta[1]})
        monkeypatch.setattr(kind, "tgz_md5", md5(packed(kind, files)))


def as_folder(root: Path, kind: type[CIFAR10], files: dict[str, bytes]) -> Path:
    return write_files(root / "batches", files)


def as_archive(root: Path, kind: type[CIFAR10], files: dict[str, bytes]) -> Path:
    return write_files(root, {kind.filename: packed(kind, files)}) / kind.filename


@pytest.mark.parametrize("pack", [as_folder, as_archive])
def test_ten(tmp_path: Path, pack: Callable[..., Path]) -> None:
    root = pack(tmp_path, CIFAR10, ten())
    train = opened(root, "cifar", split="train")
    assert train.classes == TEN and len(train.items) == 10
    assert list(labels(train).items())[:3] == [
        ("data_batch_1/00000.jpg", 0),
        ("data_batch_1/00001.jpg", 1),
        ("data_batch_2/00000.jpg", 1),
    ]
    for number, item in enumerate(train.items):
        image = Image.open(io.BytesIO(train.read(item)))
        wanted = pixels(number).astype(int)
        assert image.format == "JPEG" and np.abs(np.asarray(image) - wanted).max() <= 4
    val, test = (opened(root, "cifar", split=split) for split in ("val", "test"))
    assert labels(val) == labels(test) == {"test_batch/00000.jpg": 1, "test_batch/00001.jpg": 1}


@pytest.mark.parametrize("pack", [as_folder, as_archive])
def test_hundred(tmp_path: Path, pack: Callable[..., Path]) -> None:
    train = opened(pack(tmp_path, CIFAR100, hundred()), "cifar", split="train")
    assert labels(train) == {"train/00000.jpg": 11, "train/00001.jpg": 4}
    assert train.classes == HUNDRED and train.items[1].location == Pixels(pixels(1).tobytes())


class Harm:
    """What a pickle can do: call a function."""

    def __reduce__(self) -> tuple:
        return print, ("harm",)


@pytest.mark.parametrize("pack", [as_folder, as_archive])
@pytest.mark.parametrize("name", ["test_batch", "batches.meta"])
def test_a_pickle_of_others_is_not_opened(
    tmp_path: Path, pack: Callable[..., Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pack(tmp_path, CIFAR10, ten() | {name: pickle.dumps(Harm())})
    refuses(r"does not have the files of https://.*cifar-10-python\.tar\.gz", root, split="test")
    assert "harm" not in capsys.readouterr().out


def test_what_is_missing_or_binary(tmp_path: Path) -> None:
    root = as_folder(tmp_path, CIFAR10, ten())
    (root / "data_batch_2").unlink()
    refuses(r"does not have the files of .*; download it again", root, split="test")
    binary = write_files(tmp_path, {"cifar-100-binary.tar.gz": b"x"}) / "cifar-100-binary.tar.gz"
    refuses(r"files of https://.*cifar-100-python\.tar\.gz", binary, split="train")
