"""Tiny-ImageNet: tiny-imagenet-200.zip or its folder (train/<wnid>/images, val/images)."""

from dataclasses import dataclass
from typing import ClassVar

from data_prep.files.archives import Entry
from data_prep.files.stored import StoredSource, stored_item
from data_prep.files.tree import Tree
from data_prep.sources.source import Item, Part, own_part
from pospre.errors import UserError

_LIST, _WORDS, _VAL = "wnids.txt", "words.txt", "val/val_annotations.txt"


@dataclass(frozen=True)
class TinyImageNet(StoredSource):
    """A listed part of Tiny-ImageNet; the classes are the sorted WordNet ids."""

    kind: ClassVar[str] = "tiny_imagenet"


def detects(tree: Tree) -> bool:
    """Tell by the list of ids and the folder of validation images."""
    return tree.find(_LIST) is not None and tree.has("val")


def load(tree: Tree, part: Part) -> TinyImageNet:
    """List a part: ``train``, ``val``, or ``test``, whose labels nobody was given.

    Raises:
        UserError: a list is missing or contradicts the images.
    """
    parts = {name: name for name in ("train", "val", "test") if tree.has(name)}
    if not parts:
        raise UserError(f"{tree.root}: there is no train, val or test folder.")
    split = own_part(part, parts, tree.root)
    classes = sorted(line.strip() for line in tree.lines(_LIST, "the class ids"))
    labels = {wnid: label for label, wnid in enumerate(classes)}
    items, others = [], 0
    validation = _validation(tree) if split == "val" else {}
    for entry in tree.below(split):
        if not entry.name.lower().endswith((".jpeg", ".jpg")):
            others += 1
        elif split == "test":
            items.append(stored_item(entry, entry.name, -1))
        else:
            items.append(_item(tree, entry, validation, labels))
    if not items:
        raise UserError(f"{tree.root}: {split} holds no JPEG.")
    listed = {item.name for item in items}
    for name, wnid in validation.items():  # absent files are named when their turn comes
        if f"val/images/{name}" not in listed:
            items.append(_item(tree, tree.listed(f"val/images/{name}"), {name: wnid}, labels))
    return TinyImageNet(
        tree.root, tuple(items), classes, others, f"{split}/", titles=_titles(tree, classes)
    )


def _item(tree: Tree, entry: Entry, validation: dict[str, str], labels: dict[str, int]) -> Item:
    folders, _, name = entry.name.rpartition("/")
    wnid = validation.get(name, folders.removesuffix("/images").rpartition("/")[2])
    if wnid not in labels:
        where = _VAL if validation else "its folder"
        raise UserError(f"{tree.root}: {entry.name} has the class {wnid} by {where}, but {_LIST} "
                        "does not hold that.")  # fmt: skip
    return stored_item(entry, entry.name, labels[wnid])


def _validation(tree: Tree) -> dict[str, str]:
    """Return the class id of every validation image; none where they lie in class folders."""
    if tree.find(_VAL) is None and tree.names("val") != ["images"]:
        return {}
    rows = [line.split("\t") for line in tree.lines(_VAL, "the classes of val/images")]
    if any(len(row) < 2 for row in rows):
        raise UserError(f"{tree.root}: {_VAL} must hold a file and a class id per line, by tabs.")
    return {row[0]: row[1] for row in rows}


def _titles(tree: Tree, classes: list[str]) -> list[str] | None:
    if tree.find(_WORDS) is None:
        return None
    words = dict(line.split("\t", 1) for line in tree.lines(_WORDS, "names") if "\t" in line)
    return [words.get(wnid, wnid).strip() for wnid in classes]
