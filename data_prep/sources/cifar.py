"""CIFAR-10 and CIFAR-100: cifar-{10,100}-python.tar.gz or its folder."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from data_prep.files.archives import InFile
from data_prep.files.tree import Tree
from data_prep.sources.source import Item, Source
from data_prep.splits import Split
from pospre.errors import UserError
from pospre.scratch import scratch

if TYPE_CHECKING:  # slow to import
    from torchvision.datasets import CIFAR10

_SIDE = 32


@dataclass(frozen=True, slots=True)
class Pixels:
    """The pixels of an image: (32, 32, 3)."""

    data: bytes

    def read(self) -> bytes:
        """Return a JPEG of quality 100 with full colour.

        At 32 x 32 the usual quality would be visible, and would save little.
        """
        buffer = io.BytesIO()
        image = Image.frombytes("RGB", (_SIDE, _SIDE), self.data)
        image.save(buffer, "JPEG", quality=100, subsampling=0)
        return buffer.getvalue()


def detects(tree: Tree) -> bool:
    """Detect by the name of the archive, or the files in the folder."""
    if tree.root.is_file():
        return tree.root.name.startswith(("cifar-10-", "cifar-100-"))
    names = {*tree.names()}
    return "test_batch" in names or ({"train", "test"} <= names and tree.find("meta") is not None)


def load(tree: Tree, split: Split) -> Source:
    """List ``train``, or ``val`` = ``test``, as torchvision reads it."""
    is_train = split.choose({"train": True, "val": False, "test": False}, tree.root)
    layout = _read(tree, is_train)
    batches = [name for name, _ in (layout.train_list if is_train else layout.test_list)]
    size = len(layout.data) // len(batches)
    items = []
    for number, (image, label) in enumerate(zip(layout.data, layout.targets, strict=True)):
        pixels = image.tobytes()
        name = f"{batches[number // size]}/{number % size:05d}.jpg"
        stamp = hashlib.blake2b(pixels, digest_size=8).hexdigest()
        items.append(Item(name, label, len(pixels), stamp, Pixels(pixels)))
    return Source(tree.root, tuple(items), layout.classes, split_rule=f"{batches[0]} …")


def _read(tree: Tree, is_train: bool) -> "CIFAR10":
    """Read a split with torchvision; it opens only the pickles that CIFAR's authors offer."""
    from torchvision.datasets import CIFAR10, CIFAR100
    from torchvision.datasets.utils import check_integrity, extract_archive

    is_hundred = tree.root.name.startswith("cifar-100-") or tree.find("train") is not None
    kind = CIFAR100 if is_hundred else CIFAR10
    with scratch() as folder:
        test = tree.find(kind.test_list[0][0])
        if check_integrity(tree.root, kind.tgz_md5):
            extract_archive(tree.root, folder)
        elif test is not None and isinstance(test.location, InFile):
            there = Path(test.location.path).absolute().parent
            Path(folder, kind.base_folder).symlink_to(there)
        try:
            return kind(folder, train=is_train)
        except RuntimeError as error:
            raise UserError(
                f"{tree.root} does not have the files of {kind.url} (all of them are needed, and "
                "are compared by MD5, as a pickle may run any program); download it again."
            ) from error
