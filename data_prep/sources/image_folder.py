"""A folder of images as a source: which files are images, in which order, of which class."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from pospre.errors import UserError

# Formats that Pillow names but cannot read by itself (stubs, or a foreign program is needed).
_UNREADABLE_FORMATS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})

# First bytes of the formats recognised in files whose name says nothing.
_SIGNATURES = (
    (0, b"\xff\xd8\xff"),  # JPEG
    (0, b"\x89PNG\r\n\x1a\n"),
    (0, b"GIF8"),
    (8, b"WEBP"),
    (0, b"II*\x00"),  # TIFF, little endian
    (0, b"MM\x00*"),  # TIFF, big endian
    (4, b"ftypavif"),
    (4, b"jP  \r\n\x87\n"),  # JPEG 2000
)


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
    """A listed folder: candidate images in order of their relative path, and the class names."""

    root: Path
    files: tuple[ImageFile, ...]
    classes: tuple[str, ...] | None
    num_ignored: int

    def fingerprint(self) -> str:
        """Return a hash of every path, size and time of change: another hash, another source."""
        digest = hashlib.sha256()
        for file in self.files:
            name = os.fsencode(file.path)
            digest.update(b"%s\0%d\0%d\0%d\n" % (name, file.label, file.size, file.modified))
        return digest.hexdigest()


@cache
def image_extensions() -> frozenset[str]:
    """Return the lower-case extensions (with the dot) of every format that Pillow reads."""
    Image.init()
    return frozenset(
        extension
        for extension, name in Image.registered_extensions().items()
        if name in Image.OPEN and name not in _UNREADABLE_FORMATS
    )


def list_images(root: Path) -> ImageFolder:
    """List the images below ``root``, sorted by relative path.

    A file counts as an image when its extension belongs to a format that Pillow reads or its first
    bytes are those of a common image format; hidden files never do. The label is the index of the
    top-level sub-folder among the sorted ones, provided every image lies in a sub-folder; else -1.

    Raises:
        UserError: the folder is missing, is no folder, or holds no image.
    """
    if not root.exists():
        raise UserError(f"{root} does not exist; give the folder that holds the images.")
    if not root.is_dir():
        raise UserError(f"{root} is a file; give the folder that holds the images.")
    found, num_ignored = [], 0
    for name in _walk(root):
        if _looks_like_image(root / name):
            found.append(name)
        else:
            num_ignored += 1
    if not found:
        seen = f" ({num_ignored} other files were seen)" if num_ignored else ""
        raise UserError(f"{root} holds no image{seen}; give a folder with JPEG, PNG … files.")
    found.sort()
    classes = _class_names(found)
    labels = {name: index for index, name in enumerate(classes or ())}
    files = tuple(_image_file(root, name, labels) for name in found)
    return ImageFolder(root, files, classes, num_ignored)


def select_split(folder: ImageFolder, split: str, val_fraction: float, seed: int) -> ImageFolder:
    """Keep the ``"train"`` or the ``"val"`` part of a folder.

    Each file's part is a counter-based draw from its relative path: the two parts are
    complementary, and adding or removing files moves no other file. The class names stay those of
    the whole folder, so a label means the same in both parts.

    Raises:
        UserError: the part is empty.
    """
    from pospre import draws  # imports torch, which a conversion without a split can spare

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


def _walk(root: Path) -> Iterator[str]:
    """Yield the relative path of every visible file below ``root``, following links once."""
    visited = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # a link that leads back up
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            yield (Path(folder) / name).relative_to(root).as_posix()


def _looks_like_image(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.suffix.lower() in image_extensions():
        return True
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError:
        return False
    return any(start[at : at + len(magic)] == magic for at, magic in _SIGNATURES)


def _class_names(paths: list[str]) -> tuple[str, ...] | None:
    if any("/" not in path for path in paths):
        return None
    return tuple(sorted({path.split("/", 1)[0] for path in paths}))


def _image_file(root: Path, name: str, labels: dict[str, int]) -> ImageFile:
    label = labels.get(name.split("/", 1)[0], -1)
    try:
        status = (root / name).stat()
    except OSError:  # a dangling link: reported as unreadable when its turn comes
        return ImageFile(name, label, 0, 0)
    return ImageFile(name, label, status.st_size, status.st_mtime_ns)
