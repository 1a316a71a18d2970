"""A folder of image files; its top sub-folders are the classes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data_prep.sources.source import Item, Part, Source
from pospre.data.folder_reader import class_labels, list_images
from pospre.errors import UserError


@dataclass(frozen=True)
class FileSource(Source):
    """A source whose items are files below ``root``, found by name."""

    def read(self, item: Item) -> bytes:
        """Return a file's bytes."""
        return (self.root / item.name).read_bytes()


@dataclass(frozen=True)
class ImageFolder(FileSource):
    """A listed folder of images."""

    kind: ClassVar[str] = "image_folder"


def detects(path: Path) -> bool:
    """Tell whether this may be a folder of images: any folder may."""
    return path.is_dir()


def load(path: Path, part: Part) -> ImageFolder:
    """List the images below ``path`` in the order and with the labels of pospre's folder reader.

    Raises:
        UserError: the folder is missing, is no folder, or holds no image.
    """
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {state}; give the folder that holds the images.")
    names = list_images(path)
    classes, labels = class_labels(names)
    items = tuple(file_item(path, name, label) for name, label in zip(names, labels, strict=True))
    return ImageFolder(path, items, classes, _count_others(path, set(names))).drawn(part)


def file_item(root: Path, name: str, label: int) -> Item:
    """Return the entry of a file below ``root``."""
    try:
        status = (root / name).stat()
    except OSError:  # a dangling link: reported as unreadable when its turn comes
        return Item(name, label, 0, "")
    return Item(name, label, status.st_size, str(status.st_mtime_ns))


def _count_others(root: Path, images: set[str]) -> int:
    """Count the files that are no images; those behind links to folders are not looked at."""
    paths = (Path(folder) / name for folder, _, names in os.walk(root) for name in names)
    return sum(path.relative_to(root).as_posix() not in images for path in paths)
