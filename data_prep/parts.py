"""The parts of a data set: train, val and test, by the names of files or as it brings them."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pospre.errors import UserError

_PART = re.compile(r"(?:^|[/_.-])(train|training|val|valid|validation|test)(?=[/_.-]|\d|$)")
_SAME = {"training": "train", "valid": "val", "validation": "val"}


class Named(Protocol):
    """What has a name, such as a file of samples."""

    name: str


T = TypeVar("T")
N = TypeVar("N", bound=Named)


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

    def choose(self, parts: Mapping[str, T], root: Path, expected: str = "part") -> T:
        """Return the wanted one of the parts that a data set brings.

        Raises:
            UserError: it has no such part, or none of those ``expected``, or several and none was
                named.
        """
        there = ", ".join(parts)
        if not parts:
            raise UserError(f"{root}: there is no {expected}.")
        if self.split is None:
            if len(parts) > 1:
                raise UserError(f"{root} has the parts {there}; choose one with --split.")
            return next(iter(parts.values()))
        if self.split not in parts:
            raise UserError(f"--split {self.split}: {root} has no such part, only {there}.")
        return parts[self.split]


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
