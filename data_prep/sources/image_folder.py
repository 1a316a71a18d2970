"""A folder of images as a source: which files are images, in which order, of which class."""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pospre import draws
from pospre.data.folder_reader import class_labels, list_images
from pospre.errors import UserError


@dataclass(frozen=True)
class ImageFile:
    """One candidate image.

    Attributes:
        path: where it lies, relative to the folder, with forward slashes.
        label: index of its class, or -1.
        size: bytes on disk.
        modified: time of the last change in ns.
    """

    path: str
    label: int
    size: int
    modified: int


@dataclass(frozen=True)
class ImageFolder:
    """A listed folder: its candidate images in order, and the class names by label."""

    root: Path
    files: tuple[ImageFile, ...]
    classes: list[str] | None
    num_ignored: int

    def fingerprint(self) -> str:
        """Return a hash of every path, size and time of change: another hash, another source."""
        digest = hashlib.sha256()
        for file in self.files:
            name = os.fsencode(file.path)
            digest.update(b"%s\0%d\0%d\0%d\n" % (name, file.label, file.size, file.modified))
        return digest.hexdigest()


def list_image_folder(root: Path) -> ImageFolder:
    """List the images below ``root`` in the order and with the labels of pospre's folder reader.

    Raises:
        UserError: the folder is missing, is no folder, or holds no image.
    """
    if not root.is_dir():
        state = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root} {state}; give the folder that holds the images.")
    names = list_images(root)
    classes, labels = class_labels(names)
    files = tuple(source_file(root, name, label) for name, label in zip(names, labels, strict=True))
    return ImageFolder(root, files, classes, _count_others(root, set(names)))


def select_split(folder: ImageFolder, split: str, val_fraction: float, seed: int) -> ImageFolder:
    """Keep the ``"train"`` or the ``"val"`` part of a folder.

    Each file's part is a counter-based draw from its relative path: the two parts are
    complementary, and adding or removing files moves no other file. The class names stay those of
    the whole folder, so a label means the same in both parts.

    Raises:
        UserError: the part is empty.
    """
    hashes = [
        hashlib.blake2b(os.fsencode(file.path), digest_size=8).digest() for file in folder.files
    ]
    words = np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)
    keys = draws.sample_keys(seed, 0, words, 0, "split")
    held_out = draws.uniform(keys, 1)[:, 0] < val_fraction
    chosen = held_out if split == "val" else ~held_out
    files = tuple(file for file, keep in zip(folder.files, chosen, strict=True) if keep)
    if not files:
        raise UserError(
            f"--split {split} with --val-fraction {val_fraction} leaves no image of "
            f"{len(folder.files)}; choose another fraction or seed."
        )
    return replace(folder, files=files)


def _count_others(root: Path, images: set[str]) -> int:
    """Count the files that are no images; those behind links to folders are not looked at."""
    paths = (Path(folder) / name for folder, _, names in os.walk(root) for name in names)
    return sum(path.relative_to(root).as_posix() not in images for path in paths)


def source_file(root: Path, name: str, label: int) -> ImageFile:
    """Return the entry of a file below ``root``."""
    try:
        status = (root / name).stat()
    except OSError:  # a dangling link: reported as unreadable when its turn comes
        return ImageFile(name, label, 0, 0)
    return ImageFile(name, label, status.st_size, status.st_mtime_ns)
