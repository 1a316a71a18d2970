"""The interface of data sets for the conversion: samples in order, and reading each of them.

Every other module of this folder, except ``keywords``, ``registry`` and those whose names begin
with an underscore, is one kind of data set. It has

- a docstring whose first line describes the kind (shown by ``--help``),
- ``detects(tree) -> bool``: cheap, and false if another kind fits better,
- ``load(tree, split) -> Source``: lists the samples of the chosen split; ``UserError`` if files are
  missing, damaged or not as expected.

``tree.root`` is the path given by the user.
"""

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from PIL import Image

from data_prep.files.archives import DamagedItem, Entry, Location, read_regular
from data_prep.splits import Split
from pospre import draws
from pospre.errors import UserError
from pospre.untrusted_json import parse_json

_MOST_ENDINGS = 5


@dataclass(frozen=True, slots=True)
class Item:
    """One candidate sample."""

    name: str  # unique in its source, with forward slashes; stored with the sample
    label: int  # number of the class, or -1 if unknown
    size: int  # bytes of the encoded image, 0 if unknown
    stamp: str  # changes with the content: modification time, offset in an archive
    # input of read besides the name: a Location; None: a file below the root; or a kind's own
    location: Any = None
    # the annotation: a JSON object as bytes, the location of one or of a PNG, or None
    about: Location | bytes | None = None

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
    titles: list[str] | None = None  # readable class names by label, if classes are bare codes
    annotation_classes: list[str] | None = None  # names of class numbers inside annotations
    ignored: tuple[str, ...] = ()  # some of the num_ignored files, as examples
    kind: str = ""  # name of the module, set by open_source

    is_audio: ClassVar[bool] = False  # whether the items are WAV files rather than images
    annotation: ClassVar[str | None] = None  # type of annotate: None, "json" or "png"

    def read(self, item: Item) -> bytes:
        """Return the encoded image or clip.

        ``DamagedItem`` if it exists but cannot be used; ``OSError`` if it is missing, or the disk
        or network fails.
        """
        if item.location is None:
            return read_regular(self.root / item.name)
        image: Location = item.location
        return image.read()

    def annotate(self, item: Item) -> bytes | None:
        """Return an item's annotation besides its label, or None; errors are as in ``read``.

        JSON is one UTF-8 object. Its pixel coordinates refer to the original image, whose ``width``
        and ``height`` it contains, so that they can be scaled if the conversion shrinks images. PNG
        masks are the data set's own files, in their own size. Both match the image as stored in its
        file; the conversion turns image and mask upright.
        """
        return None

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


@dataclass(frozen=True)
class MaskSource(Source):
    """Images with PNG masks."""

    annotation: ClassVar[str | None] = "png"

    def annotate(self, item: Item) -> bytes | None:
        """Return the mask as stored: same size, values and palette."""
        return None if item.about is None else _read(item.about)


@dataclass(frozen=True)
class JsonSource(Source):
    """Images with JSON objects."""

    annotation: ClassVar[str | None] = "json"

    def annotate(self, item: Item) -> bytes | None:
        """Return the JSON object, with the ``width`` and ``height`` of the original image."""
        if item.about is None:
            return None
        try:
            content = parse_json(_read(item.about))
        except ValueError as error:
            raise DamagedItem(f"its annotation is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise DamagedItem("its annotation is not a JSON object")
        if not {"width", "height"} <= content.keys():
            content["width"], content["height"] = _size(self.read(item))
        return compact(content)


def image_item(entry: Entry, name: str, label: int, about: Entry | bytes | None = None) -> Item:
    """Return the item of an image file; its stamp also changes with the file ``about``."""
    if not isinstance(about, Entry):  # bytes come from a list, which has its own stamp
        return Item(name, label, entry.size, entry.stamp, entry.location, about)
    stamp = f"{entry.stamp} {about.stamp} {about.size}"
    return Item(name, label, entry.size, stamp, entry.location, about.location)


def jpegs_among(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return the entries with names of JPEGs, and the number of the others."""
    found = [entry for entry in entries if entry.name.lower().endswith((".jpg", ".jpeg"))]
    return found, len(entries) - len(found)


def compact(content: dict[str, Any]) -> bytes:
    """Return an object as JSON without spaces, with keys in the given order."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="backslashreplace")  # JSON's form of invalid Unicode, too


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


def _read(about: Location | bytes) -> bytes:
    return about if isinstance(about, bytes) else about.read()


def _size(data: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except Exception as error:  # Pillow raises nearly every kind on damaged bytes
        raise DamagedItem(f"its size cannot be read: {error}") from error
