"""A folder of image files: sub-folders are classes, or train/ and val/ hold class folders."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep.files.tree import Tree
from data_prep.sources._labels import labels_of
from data_prep.sources.source import Item, Source, one_of_each_ending
from data_prep.splits import Split
from pospre.data.stores.files import is_visible, names_in
from pospre.data.stores.image_folder import (
    class_labels,
    explained,
    list_folder,
    looks_like_image,
)
from pospre.data.stores.splits import own_splits
from pospre.errors import UserError


def detects(tree: Tree) -> bool:
    """Return whether this may be a folder of images: any folder may."""
    return tree.root.is_dir()


def load(tree: Tree, split: Split) -> Source:
    """List the images below the root in the order and with the labels of pospre's folder reader.

    If the sub-folders are named train and val (or validation, test), these are the splits, and
    contain class folders; see ``own_splits``.
    """
    root = tree.root
    if not root.is_dir():
        raise UserError(f"{root} is a file; give the folder that contains the images.")
    return own_split(root, split, _listed) or _listed(root).drawn(split)


def own_split(root: Path, split: Split, listed: Callable[[Path], Source]) -> Source | None:
    """List the chosen one of a folder's own splits, with the training split's classes; or None."""
    splits = own_splits(root)
    if not splits:
        return None
    chosen = split.choose(splits, root)
    folder = replace(listed(chosen), split_rule=f"{chosen.name}/")
    stray = [name for name in names_in(chosen.parent) if _is_image(chosen.parent, name)]
    if stray:
        line = f"skipped images beside the splits ({len(stray)}): {stray[0]}"
        folder = replace(folder, left_out=(*folder.left_out, line))
    if chosen == splits["train"] or folder.classes is None:
        return folder
    return _relabelled(folder, listed(splits["train"]).classes)


def _is_image(root: Path, name: str) -> bool:
    return is_visible(name) and not (root / name).is_dir() and looks_like_image(root, name)


def _listed(root: Path) -> Source:
    listing = list_folder(root)
    names, others = listing.images, listing.others
    classes, labels = class_labels(names)
    items = tuple(file_item(root, name, label) for name, label in zip(names, labels, strict=True))
    examples = tuple(explained(root, name) for name in one_of_each_ending(others))
    left_out = tuple(listing.left_out(names))
    return Source(root, items, classes, len(others), ignored=examples, left_out=left_out)


def _relabelled(folder: Source, classes: list[str] | None) -> Source:
    """Give a split the labels of the training split: it may lack images of some classes."""
    labels = labels_of(classes)
    for name in folder.classes or ():
        if name not in labels:
            raise UserError(f"{folder.root} has the class {name}, which the training split lacks.")
    items = tuple(replace(item, label=labels[item.name.split("/", 1)[0]]) for item in folder.items)
    return replace(folder, items=items, classes=classes)


def file_item(root: Path, name: str, label: int) -> Item:
    """Return the item of a file below ``root``."""
    try:
        status = (root / name).stat()
    except OSError:  # a broken link: reported as unreadable later
        return Item(name, label, 0, "")
    return Item(name, label, status.st_size, str(status.st_mtime_ns))
