"""iNaturalist: train….json, val….json (images, annotations, categories) and image folders."""

import re
from typing import Any

from data_prep.files.tree import Tree, expecting
from data_prep.sources.source import Item, Source, image_item
from data_prep.splits import Split
from pospre.errors import UserError

_LIST = re.compile(r"(train|val|test)(_mini)?(_?20\d\d)?\.json")
_WHAT = "the images and their categories"


def detects(tree: Tree) -> bool:
    """Detect by the names of the lists, and folders with images beside them."""
    names = tree.names()
    return any(map(_LIST.fullmatch, names)) and any(tree.has(name) for name in names)


def load(tree: Tree, split: Split) -> Source:
    """List the images in a split's JSON, with the labels of the training split.

    The classes are the training split's categories by id.
    """
    lists = [match for match in map(_LIST.fullmatch, tree.names()) if match]
    # the full list rather than the mini one
    paths = {match[1]: match[0] for match in sorted(lists, key=lambda match: not match[2])}
    path = split.choose(paths, tree.root, "train.json or val.json (or train2019.json …)")
    train = paths.get("train", path)
    where = f"{tree.root}: {path}"
    content = tree.json(path, _WHAT)
    with expecting(where, "images, annotations and categories"):
        categories = _categories(tree, content, path, train)
        items = _items(tree, content, categories, where)
        classes = _class_names(categories)
    stamp = " ".join(tree.need(name, _WHAT).stamp for name in sorted({path, train}))
    return Source(tree.root, tuple(items), classes, split_rule=path, metadata_stamp=stamp)


def _categories(tree: Tree, content: dict[str, Any], path: str, train: str) -> list[dict[str, Any]]:
    """Return the training split's categories by id; none for a split without, such as the test's.

    ``UserError`` if the split has a category that the training split lacks or names differently.
    """
    own = content.get("categories")
    if not own:
        return []
    of_train = own if train == path else tree.json(train, _WHAT).get("categories") or own
    known = {category["id"]: category["name"] for category in of_train}
    for category in own:  # it may list only those that occur in it
        number, name = category["id"], category["name"]
        if known.get(number) != name:
            does = f"calls {known[number]!r}" if number in known else "lacks"
            raise UserError(
                f"{tree.root}: {path}: the training split {does} the category {number} ({name!r})."
            )
    return sorted(of_train, key=lambda category: category["id"])


def _items(
    tree: Tree, content: dict[str, Any], categories: list[dict[str, Any]], where: str
) -> list[Item]:
    labels = {category["id"]: label for label, category in enumerate(categories)}
    of_image: dict[Any, Any] = {}
    for annotation in content.get("annotations", ()):  # the test split has none
        image, category = annotation["image_id"], annotation["category_id"]
        if category not in labels:
            raise UserError(f"{where}: image {image} has the category {category}, which is not "
                            "among the categories.")  # fmt: skip
        if of_image.setdefault(image, category) != category:
            raise UserError(f"{where}: image {image} has two categories; one is expected.")
    items = []
    for image in sorted(content["images"], key=lambda image: image["file_name"]):
        name = image["file_name"]
        if of_image and image["id"] not in of_image:
            raise UserError(f"{where}: {name} has no annotation, but others have.")
        label = labels[of_image[image["id"]]] if of_image else -1
        items.append(image_item(tree.listed(name), name, label))
    return items


def _class_names(categories: list[dict[str, Any]]) -> list[str] | None:
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        names = [f"{name} ({category['id']})"
                 for name, category in zip(names, categories, strict=True)]  # fmt: skip
    return names or None
