"""CIFAR-10 and CIFAR-100: the .tar.gz or its folder, in the binary or Python version."""

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
# files with the class names: of the binary versions, then of Python's
_TEXTS = ("batches.meta.txt", "fine_label_names.txt")
_PICKLES = ("batches.meta", "meta")
_KNOWN = {*_TRAIN, *_TEST, *_TEXTS, *_PICKLES}


@dataclass(frozen=True)
class Cifar(Source):
    """A listed split of CIFAR; ``val`` and ``test`` are both its test images.

    An item's location has its pixels. They are returned as JPEGs of quality 100 with full colour:
    at 32 x 32 the usual quality would be visible, and would save little.
    """

    def read(self, item: Item) -> bytes:
        """Return an image as a JPEG."""
        planes = np.frombuffer(item.location, np.uint8).reshape(3, _SIDE, _SIDE)
        buffer = io.BytesIO()
        image = Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))
        image.save(buffer, "JPEG", quality=100, subsampling=0)
        return buffer.getvalue()


def detects(tree: Tree) -> bool:
    """Detect by the name of the archive, or the files in the folder."""
    if tree.root.is_file():
        return tree.root.name.startswith(("cifar-10-", "cifar-100-"))
    there = {name.removesuffix(".bin") for name in tree.names()}
    return (
        "test_batch" in there
        or {"train", "test", "fine_label_names.txt"} <= there
        or ({"train", "test", "meta"} <= there and tree.find("meta") is not None)
    )


def load(tree: Tree, split: Split) -> Cifar:
    """List ``train``, or ``val`` = ``test``."""
    files = _files(tree)
    classes = _classes(tree, files)
    there = {name: [file for file in names if file in files or f"{file}.bin" in files]
             for name, names in (("train", _TRAIN), ("val", _TEST), ("test", _TEST))}  # fmt: skip
    batches = split.choose({name: names for name, names in there.items() if names}, tree.root)
    if batches[0] in _TRAIN[1:] and batches != list(_TRAIN[1:]):
        raise UserError(
            f"{tree.root}: of data_batch_1 to data_batch_5, only {', '.join(batches)} exist."
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
    """Return the content of all files of the folder or archive by name."""
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
            return list(content.get("fine_label_names") or content["label_names"])
    raise UserError(f"{tree.root}: the class names ({', '.join(_TEXTS + _PICKLES)}) are missing.")


def _records(
    tree: Tree, files: dict[str, bytes], batch: str, num_classes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the label and the pixels (red, green, blue planes) of every image."""
    data = files.get(f"{batch}.bin")
    if data is None:
        content = _unpickled(tree, files, batch)
        labels = content.get("fine_labels") or content["labels"]
        yield from zip(labels, (row.tobytes() for row in content["data"]), strict=True)
        return
    num_labels = 2 if num_classes > 10 else 1  # CIFAR-100: coarse, then fine
    size = num_labels + _PIXELS
    if len(data) % size or not data:
        raise UserError(f"{tree.root}: {batch}.bin has {len(data)} bytes, which is no multiple of "
                        f"{size}; download it again.")  # fmt: skip
    for start in range(0, len(data), size):
        yield data[start + num_labels - 1], data[start + num_labels : start + size]


def _unpickled(tree: Tree, files: dict[str, bytes], name: str) -> dict[str, Any]:
    """Return a pickle that torchvision identifies by its MD5: any other could run any program."""
    from torchvision.datasets import CIFAR10, CIFAR100

    known = {
        tuple(entry)
        for kind in (CIFAR10, CIFAR100)
        for entry in (*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"]))
    }
    if (name, hashlib.md5(files[name], usedforsecurity=False).hexdigest()) not in known:
        raise UserError(
            f"{tree.root}: {name} is not the file offered by CIFAR's authors (its MD5 differs), "
            "and a pickle may run any program. Download it again, or use the binary version "
            "(cifar-…-binary.tar.gz)."
        )
    content: dict[str, Any] = pickle.loads(files[name], encoding="latin1")
    return content
