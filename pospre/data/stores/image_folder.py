"""A folder of image files: its images, their order and their classes."""

import errno
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from pospre.data.decode.formats import foreign_format, own_format
from pospre.data.stores.description import LABELS, Identity, hash_of, hash_of_labels
from pospre.data.stores.files import odd_file, read_bytes, refuse_unlisted
from pospre.data.stores.reader import DamagedSample, Reader, Sample
from pospre.errors import UserError

# formats that Pillow lists but cannot read by itself (stubs, or a foreign program is needed)
_UNREADABLE_FORMATS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})

# errors of one file, not of its neighbours: forbidden, circular links, a long path
_ONE_FILES_ERRORS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)

ARRAYS = ".npy"

_NUM_START = 1024
_MOST_SIZES = 1024  # number of files, evenly spaced


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
        if self.classes is None and any("/" in name for name in self._names):
            stray = next(name for name in self._names if "/" not in name)
            warnings.warn(
                f"{path} has images in sub-folders, but also {stray} beside them: the folders are "
                "not classes, and every label is -1 (unknown).",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> Sample:
        """Return a file's bytes and its label."""
        path = self.path / self._names[index]
        odd = odd_file(path)
        if odd is not None:
            raise DamagedSample(f"{path} is not a regular file, but {odd}. {self.remedy}")
        try:
            return Sample(read_bytes(path), self._labels[index])
        except UserError as error:
            if not _is_one_files(error.__cause__, path):
                raise
            raise DamagedSample(f"{error} {self.remedy}") from error

    def about(self, index: int) -> tuple[int, str]:
        """Return a file's label and its path below the folder, without reading it."""
        return self._labels[index], self._names[index]

    def _own_identity(self) -> Identity:
        """Hash all paths and the sizes of some files: on a network each costs a round trip."""
        some = np.linspace(0, len(self) - 1, min(len(self), _MOST_SIZES)).astype(int)
        sizes = [_size(self.path / self._names[index]) for index in some]
        files = hash_of([*map(os.fsencode, self._names), repr(sizes).encode()])
        return {LABELS: hash_of_labels(self._labels), "files (paths and sizes)": files}

    def name(self, index: int) -> str:
        """Return the file's path."""
        return str(self.path / self._names[index])


def list_images(root: Path) -> list[str]:
    """Return the images below a folder: relative paths with forward slashes, sorted.

    A file counts if its extension belongs to a format that Pillow reads, or its first bytes are
    those of a common image format. If there are none, ``.npy`` files count: arrays (H, W), (H, W,
    C) or (C, H, W). Hidden files and folders are ignored; links are followed.

    Raises:
        UserError: there is no image, or a folder cannot be read.
    """
    images: list[str] = []
    others: list[str] = []
    for name in visible_files(root):
        (images if looks_like_image(root, name) else others).append(name)
    images = images or [name for name in others if name.lower().endswith(ARRAYS)]
    if not images:
        seen = ""
        if others:
            first = min(others)
            what = foreign_format(file_start(root / first))
            named = first if what is None else f"{first}: {what}"
            seen = f" ({len(others)} other files, for instance {named})"
        raise UserError(
            f"{root} has no images{seen}; give a folder of JPEG, PNG … files (in class "
            "sub-folders or flat), a .beton file or an MDS directory."
        )
    return sorted(images)


def class_labels(names: list[str]) -> tuple[list[str] | None, list[int]]:
    """Return the class names and the label of every image.

    The classes are the sorted top-level sub-folders, and a label is an index among them. If an
    image is outside the sub-folders, there are no classes (None) and all labels are −1.
    """
    if any("/" not in name for name in names):
        return None, [-1] * len(names)
    folders = [name.split("/", 1)[0] for name in names]
    classes = sorted(set(folders))
    places = {name: label for label, name in enumerate(classes)}
    return classes, [places[folder] for folder in folders]


def visible_files(root: Path) -> Iterator[str]:
    """Yield the relative path of each visible file; ``UserError`` if a folder cannot be read."""
    visited = set()
    for folder, subfolders, names in os.walk(root, onerror=refuse_unlisted, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # a circular link
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not _is_hidden(name))
        relative = Path(folder).relative_to(root).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        yield from (prefix + name for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is not data: hidden, or ext4's lost+found."""
    return name.startswith(".") or name == "lost+found"


@cache
def _image_extensions() -> frozenset[str]:
    Image.init()
    return frozenset(
        extension
        for extension, name in Image.registered_extensions().items()
        if name in Image.OPEN and name not in _UNREADABLE_FORMATS
    )


def looks_like_image(root: Path, name: str) -> bool:
    """Return whether a file is an image, by its extension or else by its first bytes.

    Raises:
        UserError: these cannot be read; a broken link may stand for a folder of images.
    """
    if os.path.splitext(name)[1].lower() in _image_extensions():  # fast: there may be millions
        return True
    try:
        return own_format(_start(root / name)) is not None
    except OSError as error:
        refuse_unlisted(error)


def file_start(path: Path) -> bytes:
    """Return a file's first kilobyte; empty if it cannot be read or is not a regular file."""
    try:
        return _start(path)
    except OSError:
        return b""


def _start(path: Path) -> bytes:
    if odd_file(path) is not None:
        return b""
    with path.open("rb", buffering=0) as file:
        return file.read(_NUM_START)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading it will report a damaged sample
        return -1


def _is_one_files(error: BaseException | None, path: Path) -> bool:
    """Return whether an error concerns one file, not the disk: its neighbours may be good."""
    if not isinstance(error, OSError):
        return False
    leads_nowhere = error.errno == errno.ENOENT and path.is_symlink()
    return leads_nowhere or error.errno in _ONE_FILES_ERRORS
