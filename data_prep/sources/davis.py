"""DAVIS video objects: JPEGImages/<resolution>/<video>, Annotations/…, ImageSets/<year>/*.txt."""

from dataclasses import dataclass
from typing import ClassVar

from data_prep.files.stored import MaskSource, stored_item
from data_prep.files.tree import Tree
from data_prep.sources.source import Part, own_part
from pospre.errors import UserError

_IMAGES, _MASKS, _SETS = "JPEGImages", "Annotations", "ImageSets"
_LISTS = {"train": "train", "val": "val", "test": "test-dev"}


@dataclass(frozen=True)
class Davis(MaskSource):
    """The frames of a part's videos in order, named ``video/frame.jpg``; there are no labels.

    Every frame of ``train`` and ``val`` has a mask, and the first of each test video; the others
    have no annotation.
    """

    kind: ClassVar[str] = "davis"


def detects(tree: Tree) -> bool:
    """Tell by the lists of videos and by folders of videos, each at a resolution."""
    return tree.has(_SETS) and any(
        tree.has(f"{_MASKS}/{name}") for name in tree.names(_IMAGES) if "." not in name
    )


def load(tree: Tree, part: Part) -> Davis:
    """List ``train``, ``val`` or ``test`` (test-dev) at 480p, or at the resolution there is.

    Raises:
        UserError: a list is missing or names videos that are not there.
    """
    resolutions = tree.names(_IMAGES)
    if not resolutions:
        raise UserError(f"{tree.root}: there is no folder {_IMAGES}.")
    resolution = "480p" if "480p" in resolutions else resolutions[0]
    lists = _lists(tree)
    videos, rule = _videos(tree, part, resolution, lists)
    masked = {
        video
        for split in ("train", "val")
        for video in (_named(tree, lists[split]) if split in lists else ())
    }
    items = []
    others = 0
    for video in videos:
        frames = tree.below(f"{_IMAGES}/{resolution}/{video}")
        if not frames:
            raise UserError(
                f"{tree.root}: {rule} names the video {video}, but {_IMAGES}/{resolution} does "
                "not hold it."
            )
        for entry in frames:
            frame, dot, extension = entry.name.rpartition("/")[2].rpartition(".")
            if extension.lower() not in ("jpg", "jpeg"):
                others += 1
                continue
            mask_name = f"{_MASKS}/{resolution}/{video}/{frame}.png"
            mask = tree.listed(mask_name) if video in masked else tree.find(mask_name)
            name = f"{video}/{frame}{dot}{extension}"
            items.append(stored_item(entry, name, -1, mask))
    return Davis(tree.root, tuple(items), num_ignored=others, split_rule=rule)


def _videos(
    tree: Tree, part: Part, resolution: str, lists: dict[str, str]
) -> tuple[list[str], str | None]:
    """Return the names of a part's videos, and the list that names them."""
    if part.split is None:
        return tree.names(f"{_IMAGES}/{resolution}"), None
    if not lists:
        raise UserError(f"{tree.root}: {_SETS}/2017/{_LISTS[part.split]}.txt (a list of videos) is "
                        "missing.")  # fmt: skip
    chosen = own_part(part, lists, tree.root)
    return _named(tree, chosen), chosen


def _lists(tree: Tree) -> dict[str, str]:
    """Return the list of each part, of the newest year."""
    # Lists of DAVIS 2016 may lie in a folder named like a resolution.
    folders = sorted(tree.names(_SETS), key=lambda name: (name.isdigit(), name), reverse=True)
    return {
        split: f"{_SETS}/{folder}/{name}.txt"
        for split, name in _LISTS.items()
        for folder in reversed(folders)
        if tree.find(f"{_SETS}/{folder}/{name}.txt")
    }


def _named(tree: Tree, path: str) -> list[str]:
    """Return the videos that a list names."""
    lines = [line.split()[0] for line in tree.lines(path, "a list of videos")]
    # A video per line, or (2016) a frame: /JPEGImages/480p/bear/00000.jpg
    return sorted({line.split("/")[-2] if "/" in line else line for line in lines})
