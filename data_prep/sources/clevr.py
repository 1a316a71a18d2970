"""CLEVR: images/<part> and scenes/CLEVR_<part>_scenes.json; the label is the number of objects."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from data_prep.files.stored import JsonSource, compact, stored_item
from data_prep.files.tree import Tree
from data_prep.sources.source import Item, Part, own_part
from pospre.errors import UserError

_MOST_OBJECTS = 10
_SCENES = re.compile(r"CLEVR_(\w+)_scenes\.json")


@dataclass(frozen=True)
class Clevr(JsonSource):
    """A listed part of CLEVR. The annotation is the scene as in the file, with the image's size.

    Its ``objects`` have ``3d_coords`` and ``pixel_coords``; the latter are pixels of the original
    image, so they shrink with ``--max-side``: scale them by ``width`` and ``height``.
    """

    kind: ClassVar[str] = "clevr"


def detects(tree: Tree) -> bool:
    """Tell by the names of the scene files."""
    return any(map(_SCENES.fullmatch, tree.names("scenes")))


def load(tree: Tree, part: Part) -> Clevr:
    """List ``train`` or ``val``, or ``test``, which has images alone.

    Raises:
        UserError: the scenes are missing or not as expected.
    """
    parts = {name: name for name in ("train", "val", "test") if tree.has(f"images/{name}")}
    if not parts:
        raise UserError(f"{tree.root}: there is no images/train, images/val or images/test.")
    split = own_part(part, parts, tree.root)
    path = f"scenes/CLEVR_{split}_scenes.json"
    if split == "test":
        items = [stored_item(entry, entry.name.removeprefix("images/"), -1)
                 for entry in tree.below("images/test")]  # fmt: skip
        return Clevr(tree.root, tuple(items), _classes([]), split_rule="images/test")
    scenes = tree.json(path, "the scenes").get("scenes")
    if not isinstance(scenes, list) or not scenes:
        raise UserError(f"{tree.root}: {path} holds no list 'scenes'.")
    items = [_item(tree, path, split, scene) for scene in scenes]
    items.sort(key=lambda item: item.name)
    stamp = tree.need(path, "the scenes").stamp
    return Clevr(tree.root, tuple(items), _classes(items), split_rule=path, metadata_stamp=stamp)


def _item(tree: Tree, path: str, split: str, scene: Any) -> Item:
    try:
        file, objects = scene["image_filename"], scene["objects"]
        count = len(objects)
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{tree.root}: a scene of {path} lacks image_filename or objects ({error})."
        ) from error
    return stored_item(
        tree.listed(f"images/{split}/{file}"), f"{split}/{file}", count, compact(scene)
    )


def _classes(items: list[Item]) -> list[str]:
    most = max((item.label for item in items), default=0)
    return [str(count) for count in range(max(most, _MOST_OBJECTS) + 1)]
