"""iNaturalist: train….json, val….json (images, annotations, categories) and image folders."""

import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from data_prep.files.stored import JsonSource, compact, stored_item
from data_prep.files.tree import Tree
from data_prep.labels import shared_categories
from data_prep.sources.source import Item, Part, own_part
from pospre.errors import UserError

_HOLDS = "the images and their categories"
_LIST = re.compile(r"(train|val|test)(_mini)?(_?20\d\d)?\.json")


@dataclass(frozen=True)
class INaturalist(JsonSource):
    """A listed part: one category per image, the classes are the categories by id.

    An annotation holds ``image_id``, ``width`` and ``height`` of the original image, the
    ``annotation`` and its ``category`` (with ``supercategory``) as in the file.

    Attributes:
        categories: the JSON of every class, here once for all its images.
    """

    categories: tuple[bytes, ...] = ()

    kind: ClassVar[str] = "inaturalist"

    def annotate(self, item: Item) -> bytes | None:
        """Return what is told of the image, and of its category where it has one."""
        about = super().annotate(item)
        if about is None or item.label < 0:
            return about
        return compact(json.loads(about) | {"category": json.loads(self.categories[item.label])})


def detects(tree: Tree) -> bool:
    """Tell by the names of the lists, and by images in other folders beside them."""
    names = tree.names()
    return any(map(_LIST.fullmatch, names)) and any(tree.has(name) for name in names)


def load(tree: Tree, part: Part) -> INaturalist:
    """List the images that a part's JSON names. The labels are those of the training part.

    Raises:
        UserError: the JSON is missing or not as expected.
    """
    lists = [match for match in map(_LIST.fullmatch, tree.names()) if match]
    # where there is both, the full list and not the mini one
    parts = {match[1]: match[0] for match in sorted(lists, key=lambda match: not match[2])}
    if not parts:
        raise UserError(f"{tree.root}: there is no train.json or val.json (or train2019.json …).")
    path = own_part(part, parts, tree.root)
    train = parts.get("train", path)
    known = None if train == path else tree.json(train, _HOLDS).get("categories")
    content = tree.json(path, _HOLDS)
    try:
        own = content.get("categories", [])
        # a part may list only the categories that occur in it; the test part lists none
        categories = shared_categories(own, known or own, f"{tree.root}: {path}") if own else []
        classes = _class_names(categories)
        items = _items(tree, content, categories, f"{tree.root}: {path}")
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{tree.root}: {path} is not as expected, with images, annotations and categories "
            f"({type(error).__name__}: {error})."
        ) from error
    if not items:
        raise UserError(f"{tree.root}: {path} names no images.")
    stamp = " ".join(tree.need(name, _HOLDS).stamp for name in sorted({path, train}))
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
    for annotation in content.get("annotations", ()):  # the test part has none
        image = annotation["image_id"]
        if annotation["category_id"] not in labels:
            raise UserError(
                f"{where}: image {image} has the category {annotation['category_id']}, which is "
                "not among the categories."
            )
        if found.setdefault(image, annotation)["category_id"] != annotation["category_id"]:
            raise UserError(f"{where}: image {image} has two categories; one is expected.")
    items = []
    for image in sorted(content["images"], key=lambda image: image["file_name"]):
        about = {"image_id": image["id"]} | {
            side: image[side] for side in ("width", "height") if side in image
        }
        annotation = found.get(image["id"])
        label = -1
        if annotation is not None:
            label = labels[annotation["category_id"]]
            about["annotation"] = annotation
        name = image["file_name"]
        items.append(stored_item(tree.listed(name), name, label, compact(about)))
    if found and any(item.label < 0 for item in items):
        lacking = next(item.name for item in items if item.label < 0)
        raise UserError(f"{where}: {lacking} has no annotation, but others have.")
    return items


def _class_names(categories: list[dict[str, Any]]) -> list[str] | None:
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        names = [f"{name} ({category['id']})"
                 for name, category in zip(names, categories, strict=True)]  # fmt: skip
    return names or None
