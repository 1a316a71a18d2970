"""A data set that is a folder of image files."""

import errno
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pospre.data.stores.description import LABELS, Identity, hash_of, hash_of_labels
from pospre.data.stores.files import odd_file, read_bytes
from pospre.data.stores.image_folder import class_labels, list_folder
from pospre.data.stores.reader import DamagedSample, Reader, Sample
from pospre.data.stores.splits import own_splits
from pospre.errors import UserError

# errors of one file, not of its neighbours: forbidden, circular links, a long path
_ONE_FILES_ERRORS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)

_MOST_SIZES = 1024  # number of files, evenly spaced


class FolderReader(Reader):
    """Reads image files straight from a folder, sorted by relative path.

    It warns of what is left out (``Listing.left_out``). ``UserError`` if the folder has splits of
    its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = "folder"
        self.remedy = (
            "Remove or replace the file; `python -m data_prep.convert` lists and leaves out all "
            "files that cannot be read."
        )
        splits = own_splits(path)
        if splits:
            raise UserError(
                f"{path} has splits of its own ({', '.join(splits)}), so held-out images would be "
                f"mixed with the others. Give the folder of one split: {splits['train']}."
            )
        listing = list_folder(path)
        self._names = listing.images
        self.classes, self._labels = class_labels(self._names)
        for line in listing.left_out(self._names):
            warnings.warn(f"{path}: {line}", stacklevel=2)

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

    def labels(self) -> Sequence[int]:
        """Return all labels, without reading the images."""
        return self._labels

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
