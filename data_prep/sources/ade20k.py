"""ADE20K scene parsing (ADEChallengeData2016): images/, annotations/, sceneCategories.txt."""

from data_prep.files.tree import Tree
from data_prep.sources._labels import labels_of
from data_prep.sources.source import Source, image_item, jpegs_among
from data_prep.splits import Split
from pospre.errors import UserError

_SCENES = "sceneCategories.txt"
_FOLDERS = {"train": "training", "val": "validation"}


def detects(tree: Tree) -> bool:
    """Detect by the folders of images and masks."""
    return any(
        tree.has(f"images/{name}") and tree.has(f"annotations/{name}") for name in _FOLDERS.values()
    )


def load(tree: Tree, split: Split) -> Source:
    """List ``train`` or ``val``; the classes are the scenes."""
    folders = {name: own for name, own in _FOLDERS.items() if tree.has(f"images/{own}")}
    folder = split.choose(folders, tree.root, "images/training or images/validation")
    scenes = {}
    for line in tree.lines(_SCENES, "the scene of every image"):
        words = line.split()
        if len(words) != 2:
            raise UserError(f"{tree.root}: {_SCENES} must hold an image and its scene per line, "
                            f"but one is {line!r}.")  # fmt: skip
        scenes[words[0]] = words[1]
    classes = sorted(set(scenes.values()))
    labels = labels_of(classes)
    images, others = jpegs_among(tree.below(f"images/{folder}"))
    items = []
    for entry in images:
        name = entry.name.rpartition("/")[2]
        stem = name.rpartition(".")[0]
        if stem not in scenes:
            raise UserError(f"{tree.root}: {_SCENES} does not list {stem}, which is in {folder}.")
        items.append(image_item(entry, f"{folder}/{name}", labels[scenes[stem]]))
    return Source(tree.root, tuple(items), classes, others, f"images/{folder}")
