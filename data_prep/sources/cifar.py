"""CIFAR-10 and CIFAR-100: the .tar.gz or its folder, the binary version or Python's."""

import hashlib
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from data_prep.files.archives import unpack
from data_prep.files.tree import Tree
from data_prep.sources.source import Item, Source
from data_prep.splits import Split
from pospre.errors import UserError

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_TRAIN = ("train", *(f"data_batch_{number}" for number in range(1, 6)))
_TEST = ("test", "test_batch")
# The files that name the classes: of the binary versions, then of Python's.
_TEXTS = ("batches.meta.txt", "fine_label_names.txt")
_PICKLES = ("batches.meta", "meta")
_KNOWN = {*_TRAIN, *_TEST, *_TEXTS, *_PICKLES}
_REMEDY = "download it again, or take the binary version (cifar-…-binary.tar.gz)"


@dataclass(frozen=True)
class Cifar(Source):
    """A listed split of CIFAR; ``val`` and ``test`` are both its test images.

    An item's location holds its pixels. They are handed on as JPEGs of quality 100 with full
    colour: at 32 x 32 the usual quality would be seen, and would save little.
    """

    def read(self, item: Item) -> bytes:
        """Return an image as a JPEG."""
        planes = np.frombuffer(item.location, np.uint8).reshape(3, _SIDE, _SIDE)
        buffer = io.BytesIO()
        image = Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))
        image.save(buffer, "JPEG", quality=100, subsampling=0)
        return buffer.getvalue()


def detects(tree: Tree) -> bool:
    """Tell by the name of the archive, or by the files in the folder."""
    if tree.root.is_file():
        return tree.root.name.startswith(("cifar-10-", "cifar-100-"))
    there = {name.removesuffix(".bin") for name in tree.names()}
    return (
        "test_batch" in there
        or {"train", "test", "fine_label_names.txt"} <= there
        or ({"train", "test", "meta"} <= there and tree.find("meta") is not None)
    )


def load(tree: Tree, split: Split) -> Cifar:
    """List ``train``, or ``val`` = ``test``.

    Raises:
        UserError: files are missing, cut off, or not CIFAR's.
    """
    files = _files(tree)
    classes = _classes(tree, files)
    there = {name: [file for file in names if file in files or f"{file}.bin" in files]
             for name, names in (("train", _TRAIN), ("val", _TEST), ("test", _TEST))}  # fmt: skip
    batches = split.choose({name: names for name, names in there.items() if names}, tree.root)
    if batches[0] in _TRAIN[1:] and batches != list(_TRAIN[1:]):
        raise UserError(
            f"{tree.root}: of data_batch_1 to data_batch_5, there is only {', '.join(batches)}."
        )
    items = []
    for batch in batches:
        for number, (label, pixels) in enumerate(_records(tree, files, batch, len(classes))):
            if not 0 <= label < len(classes):
                raise UserError(f"{tree.root}: {batch} has the label {label} at {number}, but "
                                f"there are {len(classes)} classes.")  # fmt: skip
            stamp = hashlib.blake2b(pixels, digest_size=8).hexdigest()
            items.append(Item(f"{batch}/{number:05d}.jpg", label, _PIXELS, stamp, pixels))
    return Cifar(tree.root, tuple(items), classes, split_rule=f"{batches[0]} …")


def _files(tree: Tree) -> dict[str, bytes]:
    """Return the content of all files of the folder or archive by their name."""
    if not tree.root.is_file():
        entries = (tree.find(name) for name in tree.names() if name.removesuffix(".bin") in _KNOWN)
        return {entry.name: entry.location.read() for entry in entries if entry}
    with tree.root.open("rb") as file:
        return unpack(file, tree.root, lambda name: name.removesuffix(".bin") in _KNOWN)


def _classes(tree: Tree, files: dict[str, bytes]) -> list[str]:
    for name in _TEXTS:
        if name in files:
            return files[name].decode("utf-8", "replace").split()
    for name in _PICKLES:
        if name in files:
            content = _unpickled(tree, files, name)
            key = "fine_label_names" if "fine_label_names" in content else "label_names"
            return [str(found) for found in content.get(key, ())]
    raise UserError(f"{tree.root}: the class names ({', '.join(_TEXTS + _PICKLES)}) are missing.")


def _records(
    tree: Tree, files: dict[str, bytes], batch: str, num_classes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the label and the pixels (red, green, blue planes) of every image."""
    data = files.get(f"{batch}.bin")
    if data is None:
        yield from _pickled_records(tree, files, batch)
        return
    labels = 2 if num_classes > 10 else 1  # CIFAR-100: the coarse one, then the fine one
    if len(data) % (labels + _PIXELS) or not data:
        raise UserError(f"{tree.root}: {batch}.bin has {len(data)} bytes, which is no multiple of "
                        f"{labels + _PIXELS}; {_REMEDY}.")  # fmt: skip
    for start in range(0, len(data), labels + _PIXELS):
        yield data[start + labels - 1], data[start + labels : start + labels + _PIXELS]


def _pickled_records(
    tree: Tree, files: dict[str, bytes], batch: str
) -> Iterator[tuple[int, bytes]]:
    content = _unpickled(tree, files, batch)
    array, labels = content.get("data"), content.get("fine_labels", content.get("labels"))
    images = array.content if isinstance(array, _Bytes) else None
    if (
        images is None
        or images.ndim != 2
        or images.shape[1] != _PIXELS
        or not isinstance(labels, list)
        or len(labels) != len(images)
        or not all(isinstance(label, int) for label in labels)
    ):
        raise UserError(f"{tree.root}: {batch} is no batch of CIFAR; {_REMEDY}.")
    for label, pixels in zip(labels, images, strict=True):
        yield label, pixels.tobytes()


def _unpickled(tree: Tree, files: dict[str, bytes], name: str) -> dict[Any, Any]:
    try:
        content = _Unpickler(io.BytesIO(files[name]), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise whatever its pieces do
        raise UserError(f"{tree.root}: {name} cannot be used ({type(error).__name__}: {error}); "
                        f"{_REMEDY}.") from error  # fmt: skip
    if not isinstance(content, dict):
        raise UserError(f"{tree.root}: {name} is no batch of CIFAR; {_REMEDY}.")
    # Python 3 writes the keys as it read them: as bytes
    return {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}


class _Unpickler(pickle.Unpickler):
    """Reads lists, texts, numbers and arrays of bytes: any other pickle may run any program.

    Stand-ins take the place of the few names that arrays need: numpy's own would make arrays of
    objects out of any bytes, which then are pointers.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in; raises UnpicklingError where there is none."""
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which data needs not")
        return _STAND_INS[module, name]


class _Bytes:
    """Stands in for an array and for the type of its numbers, which must be bytes."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.content: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if len(state) != 5:  # of a type
            return
        _, shape, kind, is_fortran, data = state
        if not isinstance(kind, _Bytes) or kind.arguments[0] != "u1":
            raise pickle.UnpicklingError("it holds an array of other than bytes")
        numbers = np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, np.uint8)
        self.content = numbers.reshape(shape, order="F" if is_fortran else "C")


def _encode(text: str, _encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which Python 3 writes bytes for Python 2."""
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Bytes,
    ("numpy._core.multiarray", "_reconstruct"): _Bytes,
    ("numpy", "ndarray"): _Bytes,
    ("numpy", "dtype"): _Bytes,
    ("_codecs", "encode"): _encode,
}
