"""What a data set is to the conversion: samples in an order, and a way to read each of them.

Every other module of this folder but ``keywords``, ``registry`` and those whose names begin with an
underscore is one kind of data set. It has

- a docstring whose first line describes the kind (shown by ``--help``),
- ``detects(tree) -> bool``: cheap, and false where another kind would be right,
- ``load(tree, split) -> Source``: lists the samples of the wanted split.

``tree.root`` is the path that the user gave.
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

from data_prep.files.archives import Entry
from data_prep.files.locations import DamagedItem, Location, read_regular
from data_prep.splits import Split
from pospre import draws
from pospre.errors import UserError
from pospre.untrusted_json import parse_json

_MOST_ENDINGS = 5


@dataclass(frozen=True, slots=True)
class Item:
    """One candidate sample.

    Attributes:
        name: unique in its source, with forward slashes; the sample keeps it.
        label: number of the class, or -1 where it is unknown.
        size: bytes of the encoded image, 0 where that is not known.
        stamp: changes when the content changes: time of change, offset in an archive.
        location: what ``read`` needs beside the name: a ``Location``, None for a file below the
            root, or of a kind's own.
        about: the annotation: a JSON object as bytes, the location of it or of a PNG, or None.
    """

    name: str
    label: int
    size: int
    stamp: str
    location: Any = None
    about: Location | bytes | None = None

    def __post_init__(self) -> None:
        if not self.name.isascii():
            try:
                os.fsencode(self.name)
            except UnicodeEncodeError as error:  # JSON may say "\\ud800"
                raise UserError(
                    f"the data set lists a file {self.name}, and no file can have this name: it is "
                    "no Unicode. Mend the list."
                ) from error


@dataclass(frozen=True)
class Source:
    """A listed data set. It travels to worker processes, so it holds no open files.

    Attributes:
        root: what the user gave.
        items: the candidate samples, in the order in which they are stored.
        classes: class names by label, or None.
        num_ignored: files that are no samples.
        ignored: some of them, for instance.
        split_rule: what splits the data set; None where all of it is wanted.
        metadata_stamp: changes when what describes all items (a list, a JSON) does.
        titles: readable class names by label, where ``classes`` are bare codes.
        annotation_classes: names of the numbers that stand for classes inside annotations.
        kind: name of the module; ``open_source`` sets it.
        is_audio: whether the items are WAV files instead of images.
        annotation: what ``annotate`` gives: None, ``"json"`` or ``"png"``.
    """

    root: Path
    items: tuple[Item, ...]
    classes: list[str] | None = None
    num_ignored: int = 0
    split_rule: str | None = None
    metadata_stamp: str = ""
    titles: list[str] | None = None
    annotation_classes: list[str] | None = None
    ignored: tuple[str, ...] = ()
    kind: str = ""

    is_audio: ClassVar[bool] = False
    annotation: ClassVar[str | None] = None

    def read(self, item: Item) -> bytes:
        """Return the encoded image or clip.

        Raises:
            OSError: it is absent, or the disk or network fails.
            DamagedItem: it is there and cannot be used.
        """
        if item.location is None:
            return read_regular(self.root / item.name)
        image: Location = item.location
        return image.read()

    def annotate(self, item: Item) -> bytes | None:
        """Return what the data set tells about an item beside its label, or None.

        JSON is one UTF-8 object; its pixel coordinates are those of the original image, whose
        ``width`` and ``height`` it holds, so that they can be scaled where the conversion shrinks
        images. PNG masks are the data set's own files, in their own size. Both are as the image
        lies in its file; the conversion turns it upright, and the masks with it.

        Raises:
            OSError: it is absent, or the disk or network fails.
            DamagedItem: it is there and cannot be used.
        """
        return None

    def fingerprint(self, start: int = 0, stop: int | None = None) -> str:
        """Return a hash of every name, label, size and stamp: another hash, another source.

        With ``start`` and ``stop``: of these items alone.
        """
        digest = hashlib.sha256(self.metadata_stamp.encode())
        for item in self.items[start:stop]:
            name = os.fsencode(item.name)
            stamp = item.stamp.encode()
            digest.update(b"%s\0%d\0%d\0%s\n" % (name, item.label, item.size, stamp))
        return digest.hexdigest()

    def drawn(self, split: Split) -> Self:
        """Keep the ``"train"`` or ``"val"`` items; those of a split that it brings all stay.

        Each item's split is a counter-based draw from its name: the two splits are complementary,
        and adding or removing items moves no other. The class names stay those of the whole, so a
        label means the same in both splits.

        Raises:
            UserError: the split is empty, or it is neither of the two.
        """
        if split.name is None or not self.items or self.split_rule:
            return self
        if split.name not in ("train", "val"):
            raise UserError(
                f"--split {split.name}: {self.root} has no splits of its own, and of drawn ones "
                "there are only train and val."
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
        """Return the mask as it is stored: same size, values and palette."""
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
            raise DamagedItem(f"its annotation is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise DamagedItem("its annotation is no JSON object")
        if not {"width", "height"} <= content.keys():
            content["width"], content["height"] = _size(self.read(item))
        return compact(content)


def image_item(entry: Entry, name: str, label: int, about: Entry | bytes | None = None) -> Item:
    """Return the item of an image file; its stamp changes with the file ``about`` it as well."""
    if not isinstance(about, Entry):  # bytes come from a list, which has a stamp of its own
        return Item(name, label, entry.size, entry.stamp, entry.location, about)
    stamp = f"{entry.stamp} {about.stamp} {about.size}"
    return Item(name, label, entry.size, stamp, entry.location, about.location)


def jpegs_among(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return those whose names are of JPEGs, and the number of the others."""
    found = [entry for entry in entries if entry.name.lower().endswith((".jpg", ".jpeg"))]
    return found, len(entries) - len(found)


def compact(content: dict[str, Any]) -> bytes:
    """Return an object as JSON without spaces, its keys in the order given."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="backslashreplace")  # JSON writes what is no Unicode like that, too


def draws_of_names(names: Sequence[str], seed: int, purpose: str) -> np.ndarray:
    """Return a counter-based draw in [0, 1) for each name, whatever other names there are."""
    hashes = [hashlib.blake2b(os.fsencode(name), digest_size=8).digest() for name in names]
    words = np.frombuffer(b"".join(hashes), dtype="<i8").astype(np.int64)
    return draws.uniform(draws.sample_keys(seed, 0, words, 0, purpose), 1)[:, 0]


def one_of_each_ending(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first name, sorted, of each of the most frequent endings."""
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
