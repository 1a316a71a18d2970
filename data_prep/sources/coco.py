"""COCO: annotations/instances_<name>.json and images in <name>/ or images/<name>/ (or zips)."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from data_prep.files.stored import JsonSource, compact, stored_item
from data_prep.files.tree import Tree
from data_prep.labels import shared_categories
from data_prep.sources.source import Item, Part, own_part
from pospre.errors import UserError

_FOLDER = "annotations"
# The test images have a list without objects.
_INSTANCES = re.compile(r"(instances|image_info)_((train|val|test)\w*)\.json")


@dataclass(frozen=True)
class Coco(JsonSource):
    """A listed part of COCO; images have no label of their own.

    An annotation holds ``image_id``, ``width``, ``height``, and of its objects ``boxes``
    ([x, y, width, height] in pixels of the original image: scale them where ``--max-side``
    shrank it), ``labels`` (places in ``annotation_classes``), ``iscrowd`` and ``segmentation``
    (polygons or run lengths, as in the file). Images are stored upright: of those with an
    orientation in their EXIF data the boxes are not turned, but ``orientation`` tells it.
    """

    kind: ClassVar[str] = "coco"


def detects(tree: Tree) -> bool:
    """Tell by the names of the annotation files."""
    return any(map(_INSTANCES.fullmatch, tree.names(_FOLDER)))


def load(tree: Tree, part: Part) -> Coco:
    """List the images that an annotation file names. The categories are the training part's.

    Raises:
        UserError: files are missing, or the JSON is not COCO's.
    """
    matches = [match for match in map(_INSTANCES.fullmatch, tree.names(_FOLDER)) if match]
    if not matches:
        raise UserError(
            f"{tree.root}: {_FOLDER}/instances_<train…, val… or test…>.json is missing."
        )
    by_part: dict[str, list[re.Match[str]]] = defaultdict(list)
    for match in matches:
        by_part[match[3]].append(match)
    match = _only(tree, own_part(part, by_part, tree.root))
    path, name = f"{_FOLDER}/{match[0]}", match[2]
    has_objects = match[1] == "instances"
    folder = next((folder for folder in (name, f"images/{name}") if tree.has(folder)), None)
    if folder is None:
        raise UserError(f"{tree.root}: there is no folder or zip {name} for {path}.")
    train = f"{_FOLDER}/{_only(tree, by_part.get('train', [match]))[0]}" if has_objects else path
    known = None if train == path else tree.json(train, "objects").get("categories")
    content = tree.json(path, "objects")
    where = f"{tree.root}: {path}"
    try:
        categories = shared_categories(content["categories"], known or content["categories"], where)
        items = _items(tree, folder, content, categories, where, has_objects)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is not as in COCO, with images, annotations and categories "
            f"({type(error).__name__}: {error})."
        ) from error
    if not items:
        raise UserError(f"{where} names no images.")
    stamp = " ".join(tree.need(name, "objects").stamp for name in sorted({path, train}))
    names = [category["name"] for category in categories]
    return Coco(
        tree.root, tuple(items), split_rule=path, metadata_stamp=stamp, annotation_classes=names
    )


def _only(tree: Tree, lists: list[re.Match[str]]) -> re.Match[str]:
    if len(lists) > 1:
        shown = " and ".join(match[0] for match in lists)
        raise UserError(f"{tree.root}/{_FOLDER} has {shown}; move all but one away.")
    return lists[0]


def _items(
    tree: Tree,
    folder: str,
    content: dict[str, Any],
    categories: list[dict[str, Any]],
    where: str,
    has_objects: bool,
) -> list[Item]:
    labels = {category["id"]: label for label, category in enumerate(categories)}
    objects: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for found in content["annotations"] if has_objects else ():
        if found["category_id"] not in labels:
            raise UserError(
                f"{where}: annotation {found['id']} has the category {found['category_id']}, which "
                "is not among the categories."
            )
        objects[found["image_id"]].append(found)
    items = []
    for image in sorted(content["images"], key=lambda image: image["file_name"]):
        about = {
            "image_id": image["id"],
            "width": image["width"],
            "height": image["height"],
            **(_columns(objects.pop(image["id"], ()), labels) if has_objects else {}),
        }
        name = f"{folder}/{image['file_name']}"
        items.append(stored_item(tree.listed(name), name, -1, compact(about)))
    if objects:
        raise UserError(
            f"{where}: there are annotations of the image {next(iter(objects))}, which is not "
            "among the images."
        )
    return items


def _columns(objects: Iterable[dict[str, Any]], labels: dict[Any, int]) -> dict[str, list[Any]]:
    objects = list(objects)
    return {
        "boxes": [found["bbox"] for found in objects],
        "labels": [labels[found["category_id"]] for found in objects],
        "iscrowd": [found.get("iscrowd", 0) for found in objects],
        "segmentation": [found.get("segmentation", []) for found in objects],
    }
