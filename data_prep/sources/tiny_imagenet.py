"""Tiny-ImageNet: tiny-imagenet-200.zip or its folder (train/<wnid>/images, val/images)."""

from data_prep.files.archives import Entry
from data_prep.files.tree import Tree
from data_prep.sources._labels import labels_of
from data_prep.sources.source import Item, Source, image_item, jpegs_among
from data_prep.splits import Split
from pospre.errors import UserError

_LIST, _VAL = "wnids.txt", "val/val_annotations.txt"


def detects(tree: Tree) -> bool:
    """Detect by the list of ids and the folder of validation images."""
    return tree.find(_LIST) is not None and tree.has("val")


def load(tree: Tree, split: Split) -> Source:
    """List a split: ``train``, ``val``, or ``test``, which has no labels.

    The classes are the sorted WordNet ids.
    """
    folders = {name: name for name in ("train", "val", "test") if tree.has(name)}
    folder = split.choose(folders, tree.root, "train, val or test folder")
    classes = sorted(line.strip() for line in tree.lines(_LIST, "the class ids"))
    labels = labels_of(classes)
    validation = _validation(tree) if folder == "val" else {}
    images, others = jpegs_among(tree.below(folder))
    if folder == "test":
        items = [image_item(entry, entry.name, -1) for entry in images]
    else:
        listed = {entry.name for entry in images}
        absent = [name for name in validation if f"val/images/{name}" not in listed]
        images += [tree.listed(f"val/images/{name}") for name in absent]  # reported later
        items = [_item(tree, entry, validation, labels) for entry in images]
    return Source(tree.root, tuple(items), classes, others, f"{folder}/")


def _item(tree: Tree, entry: Entry, validation: dict[str, str], labels: dict[str, int]) -> Item:
    folders, _, name = entry.name.rpartition("/")
    wnid = validation.get(name, folders.removesuffix("/images").rpartition("/")[2])
    if wnid not in labels:
        where = _VAL if validation else "its folder"
        raise UserError(f"{tree.root}: {entry.name} has the class {wnid} by {where}, but {_LIST} "
                        "does not hold that.")  # fmt: skip
    return image_item(entry, entry.name, labels[wnid])


def _validation(tree: Tree) -> dict[str, str]:
    """Return the class id of every validation image; empty if they are in class folders."""
    if tree.find(_VAL) is None and tree.names("val") != ["images"]:
        return {}
    rows = [line.split("\t") for line in tree.lines(_VAL, "the classes of val/images")]
    if any(len(row) < 2 for row in rows):
        raise UserError(f"{tree.root}: {_VAL} must have a file, a tab and a class id per line.")
    return {row[0]: row[1] for row in rows}
