"""A folder of image files: which files are images, in which order, of which class."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image

from pospre.data.files import read_bytes
from pospre.data.samples import Reader, Sample
from pospre.errors import UserError

# Formats that Pillow names but cannot read by itself (stubs, or a foreign program is needed).
_UNREADABLE_FORMATS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})

# Place and first bytes of the formats recognised in files whose name says nothing.
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


class FolderReader(Reader):
    """Reads image files straight from a folder, sorted by relative path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = "folder"
        self.remedy = (
            "Remove or replace the file; `python -m data_prep.convert` lists and leaves out all "
            "files that cannot be read."
        )
        self._names = list_images(path)
        self.classes, self._labels = class_labels(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> Sample:
        """Return a file's bytes and its label."""
        return Sample(read_bytes(self.path / self._names[index]), self._labels[index])

    def name(self, index: int) -> str:
        """Return the file's path."""
        return str(self.path / self._names[index])


def list_images(root: Path) -> list[str]:
    """Return the images below a folder: relative paths with forward slashes, sorted.

    A file counts when its extension belongs to a format that Pillow reads, or its first bytes are
    those of a common image format. Hidden files and folders do not; links are followed.

    Raises:
        UserError: there is no image.
    """
    images: list[str] = []
    others: list[str] = []
    for name in visible_files(root):
        (images if looks_like_image(root, name) else others).append(name)
    if not images:
        seen = f" ({len(others)} other files, for instance {min(others)})" if others else ""
        raise UserError(
            f"{root} holds no images{seen}; give a folder of JPEG, PNG … files (in class "
            "sub-folders or flat), a .beton file or an MDS directory."
        )
    return sorted(images)


def class_labels(names: list[str]) -> tuple[list[str] | None, list[int]]:
    """Return the class names and the label of every image.

    The classes are the sorted top-level sub-folders, and a label is a place among them. When an
    image lies outside of the sub-folders, there are no classes (None) and all labels are −1.
    """
    if any("/" not in name for name in names):
        return None, [-1] * len(names)
    folders = [name.split("/", 1)[0] for name in names]
    classes = sorted(set(folders))
    places = {name: label for label, name in enumerate(classes)}
    return classes, [places[folder] for folder in folders]


def visible_files(root: Path) -> Iterator[str]:
    """Yield the relative path of every file that is not hidden."""
    visited = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # a link that leads back up
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        relative = Path(folder).relative_to(root).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        yield from (prefix + name for name in names if not name.startswith("."))


@cache
def _image_extensions() -> frozenset[str]:
    Image.init()
    return frozenset(
        extension
        for extension, name in Image.registered_extensions().items()
        if name in Image.OPEN and name not in _UNREADABLE_FORMATS
    )


def looks_like_image(root: Path, name: str) -> bool:
    """Tell by its extension, else by its first bytes, whether a file is an image."""
    if os.path.splitext(name)[1].lower() in _image_extensions():  # fast: there may be millions
        return True
    try:
        with (root / name).open("rb") as file:
            start = file.read(16)
    except OSError:
        return False
    return any(start[at : at + len(magic)] == magic for at, magic in _SIGNATURES)
