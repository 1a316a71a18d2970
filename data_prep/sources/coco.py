"""COCO: annotations/instances_<name>.json and images in <name>/ or images/<name>/ (or zips)."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from data_prep.sources.source import Item, Part, own_part
from data_prep.stored import JsonSource, compact, stored_item
from data_prep.tree import Tree
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
    (polygons or run lengths, as in the file). Images are stored upright: those with an orientation
    in their EXIF data are turned, their boxes are not.
    """

    kind: ClassVar[str] = "coco"


def detects(tree: Tree) -> bool:
    """Tell by the names of the annotation files."""
    return any(map(_INSTANCES.fullmatch, tree.names(_FOLDER)))


def load(tree: Tree, part: Part) -> Coco:
    """List the images that an annotation file names.

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
    lists = own_part(part, by_part, tree.root)
    if len(lists) > 1:
        shown = " and ".join(match[0] for match in lists)
        raise UserError(f"{tree.root}/{_FOLDER} has {shown}; move all but one away.")
    path, name = f"{_FOLDER}/{lists[0][0]}", lists[0][2]
    folder = next((folder for folder in (name, f"images/{name}") if tree.has(folder)), None)
    if folder is None:
        raise UserError(f"{tree.root}: there is no folder or zip {name} for {path}.")
    content = tree.json(path, "objects")
    try:
        items, classes = _items(
            tree, folder, content, f"{tree.root}: {path}", lists[0][1] == "instances"
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{tree.root}: {path} is not as in COCO, with images, annotations and categories "
            f"({type(error).__name__}: {error})."
        ) from error
    if not items:
        raise UserError(f"{tree.root}: {path} names no images.")
    stamp = tree.need(path, "objects").stamp
    return Coco(
        tree.root,
        tuple(items),
        split_rule=path,
        metadata_stamp=stamp,
        annotation_classes=classes,
    )


def _items(
    tree: Tree, folder: str, content: dict[str, Any], where: str, has_objects: bool
) -> tuple[list[Item], list[str]]:
    categories = sorted(content["categories"], key=lambda category: category["id"])
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
    return items, [category["name"] for category in categories]


def _columns(objects: Iterable[dict[str, Any]], labels: dict[Any, int]) -> dict[str, list[Any]]:
    objects = list(objects)
    return {
        "boxes": [found["bbox"] for found in objects],
        "labels": [labels[found["category_id"]] for found in objects],
        "iscrowd": [found.get("iscrowd", 0) for found in objects],
        "segmentation": [found.get("segmentation", []) for found in objects],
    }
