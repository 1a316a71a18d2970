"""What a data set is to the conversion: samples in an order, and a way to read each of them.

Every other module of this folder but ``registry`` is one kind of data set. It has

- a docstring whose first line describes the kind (shown by ``--help``),
- ``detects(tree) -> bool``: cheap, and false where another kind would be right,
- ``load(tree, part) -> Source``: lists the samples of the wanted part.

``tree.root`` is the path that the user gave.
"""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np

from pospre import draws
from pospre.errors import UserError


class Named(Protocol):
    """What has a name, such as a file of samples."""

    name: str


T = TypeVar("T")
N = TypeVar("N", bound=Named)

_PART = re.compile(r"(?:^|[/_.-])(train|training|val|valid|validation|test)(?=[/_.-]|\d|$)")
_MOST_ENDINGS = 5
_SAME = {"training": "train", "valid": "val", "validation": "val"}


class DamagedItem(ValueError):
    """What is stored for one item cannot be used; its neighbours can."""


@dataclass(frozen=True, slots=True)
class Item:
    """One candidate sample.

    Attributes:
        name: unique in its source, with forward slashes; the sample keeps it.
        label: place among the classes, or -1 where it is unknown.
        size: bytes of the encoded image, 0 where that is not known.
        stamp: changes when the content changes: time of change, place in an archive.
        place: what ``read`` and ``annotate`` need beside the name.
    """

    name: str
    label: int
    size: int
    stamp: str
    place: Any = None


@dataclass(frozen=True)
class Part:
    """The wanted part of a data set.

    Attributes:
        split: ``"train"``, ``"val"``, ``"test"``, or None for all there is.
        val_fraction: share of ``"val"`` where the data set has no parts of its own.
        seed: of the draw in that case, and of those of clips that are no keyword.
        keywords: words of spoken clips, by commas, that are to be told from all else; or None.
    """

    split: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    keywords: str | None = None


@dataclass(frozen=True)
class Source(ABC):
    """A listed data set. It travels to worker processes, so it holds no open files.

    Attributes:
        root: what the user gave.
        items: the candidate samples, in the order in which they are stored.
        classes: class names by label, or None.
        num_ignored: files that are no samples.
        ignored: some of them, for instance.
        split_rule: what parts the data set; None where all of it is wanted.
        metadata_stamp: changes when what describes all items (a list, a JSON) does.
        titles: readable class names by label, where ``classes`` are bare codes.
        annotation_classes: names of the numbers that stand for classes inside annotations.
        kind: name of the module.
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

    kind: ClassVar[str]
    is_audio: ClassVar[bool] = False
    annotation: ClassVar[str | None] = None

    @abstractmethod
    def read(self, item: Item) -> bytes:
        """Return the encoded image or clip.

        Raises:
            OSError: it is absent, or the disk or network fails.
            DamagedItem: it is there and cannot be used.
        """

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

    def drawn(self, part: Part) -> Self:
        """Keep the ``"train"`` or the ``"val"`` items of a data set without parts of its own.

        Each item's part is a counter-based draw from its name: the two parts are complementary, and
        adding or removing items moves no other. The class names stay those of the whole, so a label
        means the same in both parts.

        Raises:
            UserError: the part is empty, or it is neither of the two.
        """
        if part.split is None:
            return self
        if part.split not in ("train", "val"):
            raise UserError(
                f"--split {part.split}: {self.root} has no parts of its own, and of drawn ones "
                "there are only train and val."
            )
        held_out = _held_out([item.name for item in self.items], part)
        chosen = held_out if part.split == "val" else ~held_out
        items = tuple(item for item, keep in zip(self.items, chosen, strict=True) if keep)
        if not items:
            raise UserError(
                f"--split {part.split} with --val-fraction {part.val_fraction} leaves no sample of "
                f"{len(self.items)}; choose another fraction or seed."
            )
        return replace(self, items=items, split_rule=f"drawn, val {part.val_fraction:g}")


def _held_out(names: Sequence[str], part: Part) -> np.ndarray:
    """Tell of each name whether it belongs to ``"val"``."""
    return draws_of_names(names, part.seed, "split") < part.val_fraction


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


def part_of_name(name: str) -> str | None:
    """Return the part that the name of a file or folder tells: train, val or test."""
    found = _PART.search(name)
    return _SAME.get(found[1], found[1]) if found else None


def parts_of_names(files: Sequence[N], root: Path) -> dict[str, list[N]]:
    """Return files by the part that their names tell; nothing where no name tells one.

    Raises:
        UserError: some names tell one and some do not. To draw parts from all of them would mix
            what is held out into what is trained on.
    """
    parts: dict[str | None, list[N]] = defaultdict(list)
    for file in files:
        parts[part_of_name(file.name)].append(file)
    others = parts.pop(None, [])
    if parts and others:
        told = next(iter(parts.values()))[0]
        raise UserError(
            f"{root}: the name of {told.name} tells its part ({', '.join(map(str, parts))}), that "
            f"of {others[0].name} does not; rename {others[0].name} or move it away."
        )
    return {str(part): named for part, named in parts.items()}


def own_part(part: Part, parts: Mapping[str, T], root: Path) -> T:
    """Return the wanted one of the parts that a data set brings; ``parts`` is never empty.

    Raises:
        UserError: it has no such part, or several and none was named.
    """
    there = ", ".join(parts)
    if part.split is None:
        if len(parts) > 1:
            raise UserError(f"{root} has the parts {there}; choose one with --split.")
        return next(iter(parts.values()))
    if part.split not in parts:
        raise UserError(f"--split {part.split}: {root} has no such part, only {there}.")
    return parts[part.split]
