"""ImageNet's classes and validation labels, from the devkit or Kaggle's lists."""

import csv
import io
from dataclasses import dataclass, field

from data_prep.files.archives import unpack
from data_prep.files.tree import Tree
from pospre.errors import UserError, needing

DEVKIT = "ILSVRC2012_devkit_t12"
_NUMBERS, _SYNSETS = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_KAGGLE_IMAGES, _KAGGLE_NAMES = "LOC_val_solution.csv", "LOC_synset_mapping.txt"


@dataclass(frozen=True)
class ImageNetLabels:
    """Classes of validation images.

    Attributes:
        wnids: the WordNet id by image, for instance of ``ILSVRC2012_val_00000001``.
        titles: readable names by WordNet id.
        stamp: changes with the source files.
    """

    wnids: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    stamp: str = ""


def read_labels(tree: Tree) -> ImageNetLabels:
    """Return the labels found beside the images; empty if there are none.

    Raises:
        UserError: they are damaged or incomplete.
    """
    if tree.find(_KAGGLE_IMAGES) is not None or tree.find(_KAGGLE_NAMES) is not None:
        return _by_kaggle(tree)
    archive = tree.find(f"{DEVKIT}.tar.gz")
    if archive is None and not tree.has(DEVKIT):
        return ImageNetLabels()
    if archive is None:
        named = f"{tree.root}/{DEVKIT}"
        entries = {
            name: tree.need(f"{DEVKIT}/data/{name}", "of the devkit")
            for name in (_NUMBERS, _SYNSETS)
        }
        files = {name: entry.location.read() for name, entry in entries.items()}
        stamp = entries[_NUMBERS].stamp
    else:
        named, stamp = f"{tree.root}/{DEVKIT}.tar.gz", archive.stamp
        packed = io.BytesIO(archive.location.read())
        files = unpack(packed, named, lambda name: name in (_NUMBERS, _SYNSETS))
        for name in (_NUMBERS, _SYNSETS):
            if name not in files:
                raise UserError(f"{named} does not contain data/{name}; download it again.")
    wnids, titles = _synsets(files[_SYNSETS], named)
    try:
        found = {
            f"ILSVRC2012_val_{image:08d}": wnids[int(number)]
            for image, number in enumerate(files[_NUMBERS].split(), start=1)
        }
    except (ValueError, KeyError) as error:
        raise UserError(f"{named}: {_NUMBERS} contains {error}, which is not a class.") from error
    return ImageNetLabels(found, titles, stamp)


def _by_kaggle(tree: Tree) -> ImageNetLabels:
    titles = {}
    for line in tree.lines(_KAGGLE_NAMES, "the classes"):
        wnid, _, title = line.partition(" ")
        titles[wnid] = title.strip()
    if tree.find(_KAGGLE_IMAGES) is None:
        return ImageNetLabels({}, titles, tree.need(_KAGGLE_NAMES, "the classes").stamp)
    rows = csv.DictReader(tree.lines(_KAGGLE_IMAGES, "the classes of the validation images"))
    try:
        wnids = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (csv.Error, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"{tree.root}: {_KAGGLE_IMAGES} must have the columns ImageId and PredictionString."
        ) from error
    return ImageNetLabels(wnids, titles, tree.need(_KAGGLE_IMAGES, "the classes").stamp)


def _synsets(meta: bytes, named: str) -> tuple[dict[int, str], dict[str, str]]:
    """Return the WordNet id of every number, and the name of every id, as torchvision does."""
    with needing("convert", named):
        from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = synsets[synsets["num_children"] == 0]
        wnids = {int(leaf["ILSVRC2012_ID"]): str(leaf["WNID"]) for leaf in leaves}
        return wnids, {str(leaf["WNID"]): str(leaf["words"]) for leaf in leaves}
    except Exception as error:  # SciPy raises nearly every kind on damaged bytes
        raise UserError(f"{named}: {_SYNSETS} cannot be used: {error}.") from error
