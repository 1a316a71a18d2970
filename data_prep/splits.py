"""The splits of a data set: train, val and test, by file names or its own lists."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pospre.data.stores.splits import split_of_name
from pospre.errors import UserError


class Named(Protocol):
    """An object with a name, such as a file of samples."""

    name: str


T = TypeVar("T")
N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class Split:
    """The chosen split of a data set."""

    name: str | None = None  # "train", "val", "test", or None for all
    val_fraction: float = 0.1  # share of "val" if the data set has no splits of its own
    seed: int = 0  # of this draw, and of the draw of clips that are not keywords
    # comma-separated words of spoken clips that become classes; or None
    keywords: str | None = None

    def choose(self, splits: Mapping[str, T], root: Path, expected: str = "split") -> T:
        """Return the chosen one of a data set's own splits.

        ``UserError`` if it has no such split, or none of those ``expected``, or several and none
        was chosen.
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


def files_of(split: Split, files: Sequence[N], root: Path) -> tuple[Sequence[N], str | None]:
    """Return the files of the chosen split by their names, and what defines the split.

    All files and None if no name contains a split; it is then drawn from the samples. If only some
    names contain one, ``UserError``: drawing from all would mix held-out samples into the training
    set.
    """
    splits: dict[str, list[N]] = defaultdict(list)
    for file in files:
        splits[split_of_name(file.name) or ""].append(file)
    others = splits.pop("", [])
    if not splits:
        return files, None
    if others:
        named = next(iter(splits.values()))[0]
        raise UserError(
            f"{root}: the name of {named.name} contains its split ({', '.join(splits)}), but that "
            f"of {others[0].name} does not; rename {others[0].name} or move it away."
        )
    return split.choose(splits, root), "names of the files"
