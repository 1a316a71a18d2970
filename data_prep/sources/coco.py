"""COCO: annotations/instances_<name>.json and images in <name>/ or images/<name>/ (or zips)."""

import re
from collections import defaultdict

from data_prep.files.tree import Tree, expecting
from data_prep.sources.source import Source, image_item
from data_prep.splits import Split
from pospre.errors import UserError

_FOLDER = "annotations"
# the test images have a list without objects
_INSTANCES = re.compile(r"(instances|image_info)_((train|val|test)\w*)\.json")


def detects(tree: Tree) -> bool:
    """Detect by the names of the annotation files."""
    return any(map(_INSTANCES.fullmatch, tree.names(_FOLDER)))


def load(tree: Tree, split: Split) -> Source:
    """List the images in an annotation file; they have no labels."""
    matches: dict[str, list[re.Match[str]]] = defaultdict(list)
    for match in filter(None, map(_INSTANCES.fullmatch, tree.names(_FOLDER))):
        matches[match[3]].append(match)
    lists = f"{_FOLDER}/instances_<train…, val… or test…>.json"
    chosen = split.choose(matches, tree.root, lists)
    if len(chosen) > 1:
        shown = " and ".join(match[0] for match in chosen)
        raise UserError(f"{tree.root}/{_FOLDER} has {shown}; move all but one away.")
    path, name = f"{_FOLDER}/{chosen[0][0]}", chosen[0][2]
    folder = next((folder for folder in (name, f"images/{name}") if tree.has(folder)), None)
    if folder is None:
        raise UserError(f"{tree.root}: {path} needs a folder or zip {name}.")
    with expecting(f"{tree.root}: {path}", "images as in COCO"):
        images = tree.json(path, "the images")["images"]
        names = sorted(f"{folder}/{image['file_name']}" for image in images)
    items = tuple(image_item(tree.listed(name), name, -1) for name in names)
    stamp = tree.need(path, "the images").stamp
    return Source(tree.root, items, split_rule=path, metadata_stamp=stamp)
