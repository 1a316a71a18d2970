"""CLEVR: images/<split> and scenes/CLEVR_<split>_scenes.json; the label counts the objects."""

import re
from collections.abc import Callable
from typing import Any

from data_prep.files.tree import Tree, expecting
from data_prep.sources.source import Item, Source, image_item
from data_prep.splits import Split
from pospre.errors import UserError

_MOST_OBJECTS = 10
_SCENES = re.compile(r"CLEVR_(\w+)_scenes\.json")


def detects(tree: Tree) -> bool:
    """Detect by the names of the scene files."""
    return any(map(_SCENES.fullmatch, tree.names("scenes")))


def load(tree: Tree, split: Split) -> Source:
    """List ``train`` or ``val``, or ``test``, which only has images."""
    return load_labelled(tree, split, lambda scene: len(scene["objects"]), _counts)


def load_labelled(
    tree: Tree,
    split: Split,
    label: Callable[[Any], int],
    classes: Callable[[list[Item]], list[str]],
) -> Source:
    """List scenes as ``load`` does, with a ``label`` for each; ``classes`` names these."""
    folders = {name: name for name in ("train", "val", "test") if tree.has(f"images/{name}")}
    folder = split.choose(folders, tree.root, "images/train, images/val or images/test")
    if folder == "test":
        items = [image_item(entry, entry.name.removeprefix("images/"), -1)
                 for entry in tree.below("images/test")]  # fmt: skip
        return Source(tree.root, tuple(items), classes([]), split_rule="images/test")
    path = f"scenes/CLEVR_{folder}_scenes.json"
    scenes = tree.json(path, "the scenes").get("scenes")
    if not isinstance(scenes, list) or not scenes:
        raise UserError(f"{tree.root}: {path} has no list 'scenes'.")
    with expecting(f"{tree.root}: a scene of {path}", "image_filename and objects"):
        items = [_item(tree, folder, scene, label(scene)) for scene in scenes]
    items.sort(key=lambda item: item.name)
    stamp = tree.need(path, "the scenes").stamp
    return Source(tree.root, tuple(items), classes(items), split_rule=path, metadata_stamp=stamp)


def _item(tree: Tree, folder: str, scene: Any, label: int) -> Item:
    name = f"{folder}/{scene['image_filename']}"
    return image_item(tree.listed(f"images/{name}"), name, label)


def _counts(items: list[Item]) -> list[str]:
    most = max((item.label for item in items), default=0)
    return [str(count) for count in range(max(most, _MOST_OBJECTS) + 1)]
