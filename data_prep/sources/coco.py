"""COCO: annotations/instances_<name>.json and images in <name>/ or images/<name>/ (or zips)."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from data_prep.files.tree import Tree
from data_prep.sources._labels import expecting, read_split
from data_prep.sources.source import Item, JsonSource, compact, image_item
from data_prep.splits import Split
from pospre.errors import UserError

_FOLDER = "annotations"
# the test images have a list without objects
_INSTANCES = re.compile(r"(instances|image_info)_((train|val|test)\w*)\.json")


def detects(tree: Tree) -> bool:
    """Detect by the names of the annotation files."""
    return any(map(_INSTANCES.fullmatch, tree.names(_FOLDER)))


def load(tree: Tree, split: Split) -> JsonSource:
    """List the images in an annotation file; they have no labels.

    An annotation has ``image_id``, ``width``, ``height``, and for its objects ``boxes`` ([x, y,
    width, height] in pixels of the original image; scale them if ``--max-side`` shrank it),
    ``labels`` (numbers of ``annotation_classes``, the training split's categories), ``iscrowd`` and
    ``segmentation`` (polygons or run lengths, as in the file). Images are stored upright. If EXIF
    data gave an orientation, the boxes are not turned, but ``orientation`` is included.
    """
    found: dict[str, list[re.Match[str]]] = defaultdict(list)
    for match in filter(None, map(_INSTANCES.fullmatch, tree.names(_FOLDER))):
        found[match[3]].append(match)
    lists = f"{_FOLDER}/instances_<train…, val… or test…>.json"
    match = _only(tree, split.choose(found, tree.root, lists))
    path, name = f"{_FOLDER}/{match[0]}", match[2]
    has_objects = match[1] == "instances"
    folder = next((folder for folder in (name, f"images/{name}") if tree.has(folder)), None)
    if folder is None:
        raise UserError(f"{tree.root}: {path} needs a folder or zip {name}.")
    train = f"{_FOLDER}/{_only(tree, found.get('train', [match]))[0]}" if has_objects else path
    content, categories, stamp = read_split(tree, path, train)
    where = f"{tree.root}: {path}"
    with expecting(where, "images, annotations and categories as in COCO"):
        labels = {category["id"]: label for label, category in enumerate(categories)}
        objects = _objects(content["annotations"], labels, where) if has_objects else None
        items = [
            _item(tree, folder, image, labels, objects)
            for image in sorted(content["images"], key=lambda image: image["file_name"])
        ]
        names = [category["name"] for category in categories]
    if objects:
        raise UserError(f"{where}: there are annotations of the image {next(iter(objects))}, which "
                        "is not among the images.")  # fmt: skip
    return JsonSource(
        tree.root, tuple(items), split_rule=path, metadata_stamp=stamp, annotation_classes=names
    )


def _only(tree: Tree, lists: list[re.Match[str]]) -> re.Match[str]:
    if len(lists) > 1:
        shown = " and ".join(match[0] for match in lists)
        raise UserError(f"{tree.root}/{_FOLDER} has {shown}; move all but one away.")
    return lists[0]


def _objects(
    annotations: list[dict[str, Any]], labels: dict[Any, int], where: str
) -> dict[Any, list[dict[str, Any]]]:
    """Return the objects by image."""
    objects: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for found in annotations:
        if found["category_id"] not in labels:
            raise UserError(
                f"{where}: annotation {found['id']} has the category {found['category_id']}, which "
                "is not among the categories."
            )
        objects[found["image_id"]].append(found)
    return objects


def _item(
    tree: Tree,
    folder: str,
    image: dict[str, Any],
    labels: dict[Any, int],
    objects: dict[Any, list[dict[str, Any]]] | None,
) -> Item:
    about = {"image_id": image["id"], "width": image["width"], "height": image["height"]}
    if objects is not None:
        about |= _columns(objects.pop(image["id"], ()), labels)
    name = f"{folder}/{image['file_name']}"
    return image_item(tree.listed(name), name, -1, compact(about))


def _columns(objects: Sequence[dict[str, Any]], labels: dict[Any, int]) -> dict[str, list[Any]]:
    return {
        "boxes": [found["bbox"] for found in objects],
        "labels": [labels[found["category_id"]] for found in objects],
        "iscrowd": [found.get("iscrowd", 0) for found in objects],
        "segmentation": [found.get("segmentation", []) for found in objects],
    }
