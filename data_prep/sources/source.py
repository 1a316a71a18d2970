"""The interface of data sets for the conversion: samples in order, and reading each of them.

Every other module of this folder, except ``keywords``, ``registry`` and those whose names begin
with an underscore, is one kind of data set. It has

- a docstring whose first line describes the kind (shown by ``--help``),
- ``detects(tree) -> bool``: cheap, and false if another kind fits better,
- ``load(tree, split) -> Source``: lists the samples of the chosen split; ``UserError`` if files are
  missing, damaged or not as expected.

``tree.root`` is the path given by the user.
"""

import errno
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from data_prep.files.archives import DamagedItem, Entry, Location, read_regular
from data_prep.splits import Split
from pospre import draws
from pospre.errors import UserError

_MOST_ENDINGS = 5
# errors of one file, not of its neighbours: broken links, forbidden, a long path
_ONE_FILES_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Item:
    """One candidate sample."""

    name: str  # unique in its source, with forward slashes; stored with the sample
    label: int  # number of the class, or -1 if unknown
    size: int  # bytes of the encoded image, 0 if unknown
    stamp: str  # changes with the content: modification time, offset in an archive
    location: Location | None = None  # reads its bytes; None: a file below the source's root

    def __post_init__(self) -> None:
        if not self.name.isascii():
            try:
                os.fsencode(self.name)
            except UnicodeEncodeError as error:  # JSON may contain "\\ud800"
                raise UserError(
                    f"the data set lists a file {self.name}, which is not a valid file name, "
                    "because it is not valid Unicode. Correct the list."
                ) from error


@dataclass(frozen=True)
class Source:
    """A listed data set. It is sent to worker processes, so it has no open files."""

    root: Path  # the path given by the user
    items: tuple[Item, ...]  # the candidate samples, in storage order
    classes: list[str] | None = None  # class names by label, or None
    num_ignored: int = 0  # number of files that are not samples
    split_rule: str | None = None  # what defines the split; None if all of the data set is used
    metadata_stamp: str = ""  # changes with the files that describe all items (a list, a JSON)
    ignored: tuple[str, ...] = ()  # some of the num_ignored files, as examples
    left_out: tuple[str, ...] = ()  # what else is not used, and what is no class: lines to print
    is_audio: bool = False  # whether the items are WAV files rather than images
    kind: str = ""  # name of the module, set by open_source

    def read(self, item: Item) -> bytes:
        """Return the encoded image or clip.

        ``DamagedItem`` if it exists but cannot be used; ``OSError`` if it is missing, or the disk
        or network fails.
        """
        if item.location is None:
            return read_regular(self.root / item.name)
        return item.location.read()

    def fingerprint(self, start: int = 0, stop: int | None = None) -> str:
        """Return a hash of every name, label, size and stamp of the items from start to stop."""
        digest = hashlib.sha256(self.metadata_stamp.encode())
        for item in self.items[start:stop]:
            name = os.fsencode(item.name)
            stamp = item.stamp.encode()
            digest.update(b"%s\0%d\0%d\0%s\n" % (name, item.label, item.size, stamp))
        return digest.hexdigest()

    def drawn(self, split: Split) -> Self:
        """Keep the ``"train"`` or ``"val"`` items; those of the data set's own split all stay.

        Each item's split is a counter-based draw from its name. The two splits are complementary,
        and adding or removing items moves no other. Class names are those of the whole, so labels
        have the same meaning in both splits.
        """
        if split.name is None or not self.items or self.split_rule:
            return self
        if split.name not in ("train", "val"):
            raise UserError(
                f"--split {split.name}: {self.root} has no splits of its own, and only train and "
                "val can be drawn."
            )
        held_out = draws_of_names([item.name for item in self.items], split.seed, "split")
        held_out = held_out < split.val_fraction
        chosen = held_out if split.name == "val" else ~held_out
        items = tuple(item for item, keep in zip(self.items, chosen, strict=True) if keep)
        if not items:
            raise UserError(
                f"--split {split.name} with --val-fraction {split.val_fraction} leaves no sample "
                f"of {len(self.items)}; choose another fraction or seed."
            )
        return replace(self, items=items, split_rule=f"drawn, val {split.val_fraction:g}")


def read_item(source: Source, item: Item) -> bytes:
    """Return the encoded image or clip of an item; ``DamagedItem`` if it has no usable content.

    ``UserError`` if the disk or the network fails, or a listed file has vanished; leaving such
    items out would lose good ones.
    """
    try:
        data = source.read(item)
    except OSError as error:
        if error.errno == errno.ENOENT and item.stamp:
            raise UserError(
                f"{source.root / item.name} existed when {source.root} was listed, but is gone: "
                f"{error.strerror}. Check the disk or the network share, then run the same command "
                "again."
            ) from error
        if error.errno in _ONE_FILES_ERRORS:
            raise DamagedItem(error.strerror or str(error)) from error
        raise UserError(
            f"{source.root / item.name} cannot be read: {error.strerror or error}. The file is not "
            "the cause: check the disk or the network share, then run the same command again. "
            "Nothing was written."
        ) from error
    except MemoryError as error:
        raise DamagedItem("the file is larger than the memory") from error
    if not data:
        raise DamagedItem("the file is empty")
    return data


def image_item(entry: Entry, name: str, label: int) -> Item:
    """Return the item of an image file."""
    return Item(name, label, entry.size, entry.stamp, entry.location)


def jpegs_among(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return the entries with names of JPEGs, and the number of the others."""
    jpegs = [entry for entry in entries if entry.name.lower().endswith((".jpg", ".jpeg"))]
    return jpegs, len(entries) - len(jpegs)


def draws_of_names(names: Sequence[str], seed: int, purpose: str) -> np.ndarray:
    """Return a counter-based draw in [0, 1) for each name, independent of other names."""
    hashes = [hashlib.blake2b(os.fsencode(name), digest_size=8).digest() for name in names]
    words = np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)
    return draws.uniform(draws.sample_keys(seed, 0, words, 0, purpose), 1)[:, 0]


def one_of_each_ending(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first name, sorted, for each of the most frequent extensions."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for name in names:
        ending = os.path.splitext(name)[1].lower()
        counts[ending] += 1
        first[ending] = min(name, first.get(ending, name))
    often = sorted(counts, key=lambda ending: (-counts[ending], ending))
    return tuple(first[ending] for ending in often[:_MOST_ENDINGS])
