"""The splits of a data set: train, val and test, by the names of files or as it brings them."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pospre.errors import UserError

_SPLIT = re.compile(r"(?:^|[/_.-])(train|training|val|valid|validation|test)(?=[/_.-]|\d|$)")
_SAME = {"training": "train", "valid": "val", "validation": "val"}


class Named(Protocol):
    """What has a name, such as a file of samples."""

    name: str


T = TypeVar("T")
N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class Split:
    """The wanted split of a data set.

    Attributes:
        name: ``"train"``, ``"val"``, ``"test"``, or None for all there is.
        val_fraction: share of ``"val"`` where the data set has no splits of its own.
        seed: of the draw in that case, and of those of clips that are no keyword.
        keywords: words of spoken clips that become classes of their own, by commas; or None.
    """

    name: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    keywords: str | None = None

    def choose(self, splits: Mapping[str, T], root: Path, expected: str = "split") -> T:
        """Return the wanted one of the splits that a data set brings.

        Raises:
            UserError: it has no such split, or none of those ``expected``, or several and none was
                named.
        """
        there = ", ".join(splits)
        if not splits:
            raise UserError(f"{root}: there is no {expected}.")
        if self.name is None:
            if len(splits) > 1:
                raise UserError(f"{root} has the splits {there}; choose one with --split.")
            return next(iter(splits.values()))
        if self.name not in splits:
            raise UserError(f"--split {self.name}: {root} has no such split, only {there}.")
        return splits[self.name]


def split_of_name(name: str) -> str | None:
    """Return the split that the name of a file or folder tells: train, val or test."""
    found = _SPLIT.search(name)
    return _SAME.get(found[1], found[1]) if found else None


def files_of(split: Split, files: Sequence[N], root: Path) -> tuple[Sequence[N], str | None]:
    """Return the files whose names tell the wanted split, and what splits the data set.

    All files and None where no name tells a split: it is drawn from the samples.

    Raises:
        UserError: there is no such split, or only some names tell one. To draw splits from all of
            them would mix what is held out into what is trained on.
    """
    splits: dict[str, list[N]] = defaultdict(list)
    for file in files:
        splits[split_of_name(file.name) or ""].append(file)
    others = splits.pop("", [])
    if not splits:
        return files, None
    if others:
        told = next(iter(splits.values()))[0]
        raise UserError(
            f"{root}: the name of {told.name} tells its split ({', '.join(splits)}), "
            f"that of {others[0].name} does not; rename {others[0].name} or move it away."
        )
    return split.choose(splits, root), "names of the files"
