"""iNaturalist: train….json, val….json (images, annotations, categories) and image folders."""

import re
from dataclasses import dataclass
from typing import Any

from data_prep.files.tree import Tree
from data_prep.sources._labels import expecting, read_split
from data_prep.sources.source import Item, JsonSource, compact, image_item
from data_prep.splits import Split
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

_LIST = re.compile(r"(train|val|test)(_mini)?(_?20\d\d)?\.json")


@dataclass(frozen=True)
class INaturalist(JsonSource):
    """A listed split: one category per image, the classes are the categories by id.

    An annotation has ``image_id``, ``width`` and ``height`` of the original image, the
    ``annotation`` and its ``category`` (with ``supercategory``) as in the file.
    """

    categories: tuple[bytes, ...] = ()  # the JSON of every class, stored once for all its images

    def annotate(self, item: Item) -> bytes | None:
        """Return the annotation of the image, and its category if it has one."""
        about = super().annotate(item)
        if about is None or item.label < 0:
            return about
        return compact(
            parse_object(about) | {"category": parse_object(self.categories[item.label])}
        )


def detects(tree: Tree) -> bool:
    """Detect by the names of the lists, and folders with images beside them."""
    names = tree.names()
    return any(map(_LIST.fullmatch, names)) and any(tree.has(name) for name in names)


def load(tree: Tree, split: Split) -> INaturalist:
    """List the images in a split's JSON, with the labels of the training split."""
    lists = [match for match in map(_LIST.fullmatch, tree.names()) if match]
    # the full list rather than the mini one
    paths = {match[1]: match[0] for match in sorted(lists, key=lambda match: not match[2])}
    path = split.choose(paths, tree.root, "train.json or val.json (or train2019.json …)")
    content, categories, stamp = read_split(tree, path, paths.get("train", path))
    if not content.get("categories"):  # the test split has no labels
        categories = []
    where = f"{tree.root}: {path}"
    with expecting(where, "images, annotations and categories"):
        items = _items(tree, content, categories, where)
        classes = _class_names(categories)
    return INaturalist(
        tree.root,
        tuple(items),
        classes,
        split_rule=path,
        metadata_stamp=stamp,
        categories=tuple(map(compact, categories)),
    )


def _items(
    tree: Tree, content: dict[str, Any], categories: list[dict[str, Any]], where: str
) -> list[Item]:
    labels = {category["id"]: label for label, category in enumerate(categories)}
    found: dict[Any, dict[str, Any]] = {}
    for annotation in content.get("annotations", ()):  # the test split has none
        image, category = annotation["image_id"], annotation["category_id"]
        if category not in labels:
            raise UserError(f"{where}: image {image} has the category {category}, which is not "
                            "among the categories.")  # fmt: skip
        if found.setdefault(image, annotation)["category_id"] != category:
            raise UserError(f"{where}: image {image} has two categories; one is expected.")
    items = []
    for image in sorted(content["images"], key=lambda image: image["file_name"]):
        name, annotation = image["file_name"], found.get(image["id"])
        if found and annotation is None:
            raise UserError(f"{where}: {name} has no annotation, but others have.")
        about = {"image_id": image["id"]}
        about |= {side: image[side] for side in ("width", "height") if side in image}
        label = -1
        if annotation is not None:
            label = labels[annotation["category_id"]]
            about["annotation"] = annotation
        items.append(image_item(tree.listed(name), name, label, compact(about)))
    return items


def _class_names(categories: list[dict[str, Any]]) -> list[str] | None:
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        names = [f"{name} ({category['id']})"
                 for name, category in zip(names, categories, strict=True)]  # fmt: skip
    return names or None
