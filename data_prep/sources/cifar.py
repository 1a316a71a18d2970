"""CIFAR-10 and CIFAR-100: the .tar.gz or its folder, the binary version or Python's."""

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from data_prep.files.numpy_pickle import PickleError, load_arrays
from data_prep.files.tree import Tree
from data_prep.sources.source import Item, Part, Source, own_part
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
    """A listed part of CIFAR; ``val`` and ``test`` are both its test images.

    An item's place holds its pixels. They are handed on as JPEGs of quality 100 with full colour:
    at 32 x 32 the usual quality would be seen, and would save little.
    """

    kind: ClassVar[str] = "cifar"

    def read(self, item: Item) -> bytes:
        """Return an image as a JPEG."""
        planes = np.frombuffer(item.place, np.uint8).reshape(3, _SIDE, _SIDE)
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


def load(tree: Tree, part: Part) -> Cifar:
    """List ``train``, or ``val`` = ``test``.

    Raises:
        UserError: files are missing, cut off, or not CIFAR's.
    """
    files = _files(tree)
    classes = _classes(tree, files)
    there = {split: [name for name in names if name in files or f"{name}.bin" in files]
             for split, names in (("train", _TRAIN), ("val", _TEST), ("test", _TEST))}  # fmt: skip
    batches = own_part(part, {split: names for split, names in there.items() if names}, tree.root)
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
        return {entry.name: entry.place.read() for entry in entries if entry}
    files = {}
    try:
        with tarfile.open(tree.root) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                name = member.name.rpartition("/")[2]
                if file is not None and name.removesuffix(".bin") in _KNOWN:
                    files[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UserError(f"{tree.root} is damaged or no tar: {error}; download it again.") from error
    return files


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
    images, labels = content.get("data"), content.get("fine_labels", content.get("labels"))
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
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
        content = load_arrays(files[name])
    except PickleError as error:
        raise UserError(f"{tree.root}: {name} cannot be used: {error}; {_REMEDY}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{tree.root}: {name} is no batch of CIFAR; {_REMEDY}.")
    # Python 3 writes the keys as it read them: as bytes
    return {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}
