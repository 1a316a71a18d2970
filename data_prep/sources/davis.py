"""DAVIS video objects: JPEGImages/<resolution>/<video>, Annotations/…, ImageSets/<year>/*.txt."""

from data_prep.files.tree import Tree
from data_prep.sources.source import Source, image_item, jpegs_among
from data_prep.splits import Split
from pospre.errors import UserError

_IMAGES, _MASKS, _SETS = "JPEGImages", "Annotations", "ImageSets"
_LISTS = {"train": "train", "val": "val", "test": "test-dev"}


def detects(tree: Tree) -> bool:
    """Detect by the lists of videos, and folders of videos at a resolution."""
    return tree.has(_SETS) and any(
        tree.has(f"{_MASKS}/{name}") for name in tree.names(_IMAGES) if "." not in name
    )


def load(tree: Tree, split: Split) -> Source:
    """List ``train``, ``val`` or ``test`` (test-dev) at 480p, or else at the available resolution.

    The items are the frames of the split's videos in order, named ``video/frame.jpg``, without
    labels.
    """
    resolutions = tree.names(_IMAGES)
    if not resolutions:
        raise UserError(f"{tree.root}: the folder {_IMAGES} is missing.")
    resolution = "480p" if "480p" in resolutions else resolutions[0]
    rule = None
    if split.name is not None:
        rule = split.choose(_lists(tree), tree.root, f"{_SETS}/2017/{_LISTS[split.name]}.txt")
    videos = _named(tree, rule) if rule else tree.names(f"{_IMAGES}/{resolution}")
    items, others = [], 0
    for video in videos:
        below = tree.below(f"{_IMAGES}/{resolution}/{video}")
        if not below:
            raise UserError(
                f"{tree.root}: {rule} lists the video {video}, but {_IMAGES}/{resolution} does not "
                "contain it."
            )
        frames, count = jpegs_among(below)
        others += count
        for entry in frames:
            items.append(image_item(entry, f"{video}/{entry.name.rpartition('/')[2]}", -1))
    return Source(tree.root, tuple(items), num_ignored=others, split_rule=rule)


def _lists(tree: Tree) -> dict[str, str]:
    """Return the list of each split, from the newest year."""
    # lists of DAVIS 2016 may be in a folder named like a resolution
    folders = sorted(tree.names(_SETS), key=lambda name: (name.isdigit(), name), reverse=True)
    return {
        which: f"{_SETS}/{folder}/{name}.txt"
        for which, name in _LISTS.items()
        for folder in reversed(folders)
        if tree.find(f"{_SETS}/{folder}/{name}.txt")
    }


def _named(tree: Tree, path: str) -> list[str]:
    """Return the videos in a list."""
    lines = [line.split()[0] for line in tree.lines(path, "a list of videos")]
    # a video per line, or (2016) a frame: /JPEGImages/480p/bear/00000.jpg
    return sorted({line.split("/")[-2] if "/" in line else line for line in lines})
