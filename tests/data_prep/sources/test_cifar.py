import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep.sources.registry import open_source
from pospre.errors import UserError
from tests.data_prep.sample_images import picture, write_files
from tests.data_prep.sources.fakes import converted, labels, opened, tar_bytes, text

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


def pickled_ten() -> dict[str, bytes]:
    files = {
        name: pickle.dumps(
            {
                b"data": np.stack([planes(2 * place).ravel(), planes(2 * place + 1).ravel()]),
                b"labels": [place % 2, 1],
                b"filenames": [b"a.png", b"b.png"],
            },
            protocol=2,
        )
        for place, name in enumerate(BATCHES)
    }
    return files | {"batches.meta": pickle.dumps({"label_names": TEN}, protocol=2)}


def python_two(data: np.ndarray, fine: list[int]) -> bytes:
    """A batch as Python 2 wrote it, byte strings and all."""

    def short(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"K" + bytes([value])

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + short(b"b") + b"tR"
        b"(K\x01" + number(len(data)) + b"M" + data.shape[1].to_bytes(2, "little") + b"\x86"
        b"cnumpy\ndtype\n(" + short(b"u1") + b"K\x00K\x01tR(K\x03" + short(b"|") + b"NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + data.nbytes.to_bytes(4, "little") + data.tobytes() + b"tb"
    )
    listed = b"](" + b"".join(map(number, fine)) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"fine_labels") + listed + b"u."


def pickled_hundred() -> dict[str, bytes]:
    return {
        "train": python_two(np.stack([planes(0).ravel(), planes(1).ravel()]), [11, 4]),
        "test": python_two(planes(2).reshape(1, -1), [7]),
        "meta": pickle.dumps({"fine_label_names": HUNDRED, "coarse_label_names": []}, protocol=2),
    }


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


def test_to_shards(tmp_path: Path) -> None:
    archive = as_archive(tmp_path, binary_ten())
    samples = converted(archive, tmp_path / "mds", "--split", "train")
    assert [sample["label"] for sample in samples] == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1]


class Made:
    """Pickled as a call with a state."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


def array(code: str, shape: Any, data: Any, order: str = "|") -> bytes:
    kind = Made(np.dtype, (code, False, True), (3, order, None, None, None, -1, -1, 0))
    reconstruct = np.empty(0).__reduce__()[0]
    made = Made(reconstruct, (np.ndarray, (0,), b"b"), (1, shape, kind, False, data))
    return pickle.dumps({"data": made, "labels": [0]}, protocol=2)


def test_arrays_lie_in_either_order(tmp_path: Path) -> None:
    images = np.stack([planes(0).ravel(), planes(1).ravel()])
    batch = {"data": np.asfortranarray(images), "labels": [0, 1]}
    root = as_folder(tmp_path, pickled_ten() | {"test_batch": pickle.dumps(batch)})
    assert [item.location for item in opened(root, "cifar", split="test").items] == [
        planes(0).tobytes(),
        planes(1).tobytes(),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # bytes that would be taken for pointers, with numpy's own types
        (array("O8", (384, 1), b"A" * 3072), r"an array of other than bytes"),
        (array("f8,O", (192, 1), b"A" * 3072), r"an array of other than bytes"),
        (array("i8", (1, 384), b"A" * 3072), r"an array of other than bytes"),
        (array("u1", (1, 3072), [1, 2, 3]), r"cannot be used \(TypeError"),
        (array("u1", (1, 3072), b"A" * 8), r"cannot be used \(ValueError: cannot reshape"),
        (pickle.dumps({"data": Made(np.ndarray, ((1 << 50,), "O")), "labels": []}), r"is no batch"),
        (
            pickle.dumps({"data": Made(print, ("harm",))}),
            r"test_batch cannot be used .*it asks for builtins\.print",
        ),
        (b"\x80\x02}(U", r"cannot be used .*truncated.*take the binary version"),
        (pickle.dumps([1]), r"is no batch of CIFAR"),
        (pickle.dumps({"data": np.zeros((1, 9), np.uint8), "labels": [0]}), r"is no batch"),
        (pickle.dumps({"data": np.zeros((1, 3072), "u1"), "labels": ["x"]}), r"is no batch"),
        (
            pickle.dumps({"data": np.zeros((1, 3072), "u1"), "labels": [7]}),
            r"test_batch has the label 7 at 0, but there are 2 classes",
        ),
    ],
)
def test_pickles_that_are_none(
    tmp_path: Path, data: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = as_folder(tmp_path, pickled_ten() | {"test_batch": data})
    with pytest.raises(UserError, match=message):
        open_source(root, split="test")
    assert "harm" not in capsys.readouterr().out


def test_what_is_cut_off_or_missing(tmp_path: Path) -> None:
    archive = as_archive(tmp_path, binary_ten())
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"cifar-10-any\.tar\.gz is damaged or no tar"):
        open_source(archive, split="train")
    root = as_folder(tmp_path, binary_ten())
    (root / "data_batch_2.bin").write_bytes(record(0, 1)[:-1])
    with pytest.raises(UserError, match=r"data_batch_2\.bin has 3072 bytes, which is no multiple"):
        open_source(root, split="train")
    (root / "data_batch_2.bin").unlink()
    with pytest.raises(UserError, match=r"there is only data_batch_1, data_batch_3"):
        open_source(root, split="train")
    for number in range(3, 6):
        (root / f"data_batch_{number}.bin").unlink()
    with pytest.raises(UserError, match=r"there is only data_batch_1\."):
        open_source(root, split="train")
    (root / "batches.meta.txt").unlink()
    with pytest.raises(UserError, match=r"the class names .* are missing"):
        open_source(root, split="train")
