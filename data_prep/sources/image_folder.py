"""A folder of image files: sub-folders are classes, or train/ and val/ hold class folders."""

from dataclasses import replace
from pathlib import Path

from data_prep.files.archives import is_visible
from data_prep.files.tree import Tree
from data_prep.sources._labels import labels_of
from data_prep.sources.source import Item, Source, one_of_each_ending
from data_prep.splits import Split, split_of_name
from pospre.data.decode.formats import foreign_format
from pospre.data.stores.files import names_in, odd_file
from pospre.data.stores.image_folder import class_labels, file_start, list_images, visible_files
from pospre.errors import UserError


def detects(tree: Tree) -> bool:
    """Return whether this may be a folder of images: any folder may."""
    return tree.root.is_dir()


def load(tree: Tree, split: Split) -> Source:
    """List the images below the root in the order and with the labels of pospre's folder reader.

    If the sub-folders are named train and val (or validation, test), these are the splits, and
    contain class folders.
    """
    root = tree.root
    if not root.is_dir():
        raise UserError(f"{root} is a file; give the folder that contains the images.")
    splits = _own_splits(root)
    if not splits:
        return _listed(root).drawn(split)
    chosen = split.choose(splits, root)
    folder = replace(_listed(chosen), split_rule=f"{chosen.name}/")
    if chosen == splits["train"] or folder.classes is None:
        return folder
    return _relabelled(folder, class_labels(list_images(splits["train"]))[0])


def _listed(root: Path) -> Source:
    names = list_images(root)
    classes, labels = class_labels(names)
    items = tuple(file_item(root, name, label) for name, label in zip(names, labels, strict=True))
    others = set(visible_files(root)).difference(names)
    examples = tuple(_told(root, name) for name in one_of_each_ending(others))
    return Source(root, items, classes, len(others), ignored=examples)


def _own_splits(root: Path) -> dict[str, Path]:
    """Return the splits if every sub-folder is one; a class could also be named test."""
    folders = [name for name in names_in(root) if is_visible(name) and (root / name).is_dir()]
    splits = {split_of_name(name) or "": root / name for name in sorted(folders)}
    if "" in splits and "train" in folders and {"val", "valid", "validation", "test"} & {*folders}:
        raise UserError(
            f"{root} has splits ({', '.join(sorted(set(splits) - {''}))}), but {splits[''].name} "
            "is not one; move it away, or give the folder of one split."
        )
    if "train" not in splits or "" in splits:
        return {}
    for name in folders:
        other = splits[split_of_name(name) or ""].name
        if other != name:
            raise UserError(
                f"{root}: {name} and {other} are both the split {split_of_name(name)}; move one "
                "away."
            )
    return splits


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


def _told(root: Path, name: str) -> str:
    """Return a name and its format, if it is a picture that Pillow cannot read."""
    what = odd_file(root / name) or foreign_format(file_start(root / name))
    return name if what is None else f"{name}: {what}"
