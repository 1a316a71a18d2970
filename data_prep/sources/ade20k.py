"""ADE20K scene parsing (ADEChallengeData2016): images/, annotations/, sceneCategories.txt."""

from dataclasses import dataclass
from typing import ClassVar

from data_prep.files.stored import MaskSource, stored_item
from data_prep.files.tree import Tree
from data_prep.sources.source import Part, own_part
from pospre.errors import UserError

_SCENES = "sceneCategories.txt"
_FOLDERS = {"train": "training", "val": "validation"}


@dataclass(frozen=True)
class Ade20k(MaskSource):
    """A listed part of ADE20K; the classes are the scenes, the masks hold 150 objects from 1."""

    kind: ClassVar[str] = "ade20k"


def detects(tree: Tree) -> bool:
    """Tell by the folders of images and masks."""
    return any(
        tree.has(f"images/{name}") and tree.has(f"annotations/{name}") for name in _FOLDERS.values()
    )


def load(tree: Tree, part: Part) -> Ade20k:
    """List ``train`` or ``val``.

    Raises:
        UserError: the list of scenes is missing or lacks an image.
    """
    parts = {part: name for part, name in _FOLDERS.items() if tree.has(f"images/{name}")}
    if not parts:
        raise UserError(f"{tree.root}: there is no images/training or images/validation.")
    folder = own_part(part, parts, tree.root)
    scenes = dict(_pair(tree, line) for line in tree.lines(_SCENES, "the scene of every image"))
    classes = sorted(set(scenes.values()))
    labels = {name: label for label, name in enumerate(classes)}
    items, others = [], 0
    for entry in tree.below(f"images/{folder}"):
        stem, dot, extension = entry.name.rpartition("/")[2].rpartition(".")
        if extension.lower() not in ("jpg", "jpeg"):
            others += 1
            continue
        if stem not in scenes:
            raise UserError(f"{tree.root}: {_SCENES} does not name {stem}, which is in {folder}.")
        mask = tree.listed(f"annotations/{folder}/{stem}.png")
        items.append(stored_item(entry, f"{folder}/{stem}{dot}{extension}",
                                 labels[scenes[stem]], mask))  # fmt: skip
    if not items:
        raise UserError(f"{tree.root}: images/{folder} holds no JPEG.")
    return Ade20k(tree.root, tuple(items), classes, others, f"images/{folder}")


def _pair(tree: Tree, line: str) -> tuple[str, str]:
    words = line.split()
    if len(words) != 2:
        raise UserError(f"{tree.root}: {_SCENES} must hold an image and its scene per line, but "
                        f"one is {line!r}.")  # fmt: skip
    return words[0], words[1]
