"""What is told about ImageNet's classes and validation images: by the devkit, or by Kaggle."""

import csv
import io
import tarfile
import zlib
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from data_prep.files.matlab import MatlabError, read_matlab
from data_prep.files.tree import Tree
from pospre.errors import UserError

DEVKIT = "ILSVRC2012_devkit_t12"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_KAGGLE_TRUTH, _KAGGLE_NAMES = "LOC_val_solution.csv", "LOC_synset_mapping.txt"


@dataclass(frozen=True)
class Truth:
    """Classes of validation images.

    Attributes:
        wnids: the WordNet id by image, for instance of ``ILSVRC2012_val_00000001``.
        titles: readable names by WordNet id.
        stamp: changes when the files that tell this do.
    """

    wnids: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    stamp: str = ""


def read_truth(tree: Tree) -> Truth:
    """Return what lies beside the images; nothing where nothing does.

    Raises:
        UserError: it is damaged, or half of it is missing.
    """
    if tree.find(_KAGGLE_TRUTH) is not None or tree.find(_KAGGLE_NAMES) is not None:
        return _kaggle(tree)
    archive = tree.find(f"{DEVKIT}.tar.gz")
    if archive is None and not tree.has(DEVKIT):
        return Truth()
    if archive is None:
        named = f"{tree.root}/{DEVKIT}"
        files = {
            name: tree.need(f"{DEVKIT}/{name}", "of the devkit").place.read()
            for name in (_TRUTH, _META)
        }
        stamp = tree.need(f"{DEVKIT}/{_TRUTH}", "of the devkit").stamp
    else:
        named, stamp = f"{tree.root}/{DEVKIT}.tar.gz", archive.stamp
        files = _unpacked(archive.place.read(), named)
    wnids, titles = _synsets(files[_META], named)
    numbers = files[_TRUTH].split()
    try:
        found = {
            f"ILSVRC2012_val_{place:08d}": wnids[int(number)]
            for place, number in enumerate(numbers, start=1)
        }
    except (ValueError, KeyError) as error:
        raise UserError(f"{named}: {_TRUTH} holds {error}, which is no class.") from error
    return Truth(found, titles, stamp)


def _kaggle(tree: Tree) -> Truth:
    titles = {}
    for line in tree.lines(_KAGGLE_NAMES, "the classes"):
        wnid, _, title = line.partition(" ")
        titles[wnid] = title.strip()
    if tree.find(_KAGGLE_TRUTH) is None:
        return Truth({}, titles, tree.need(_KAGGLE_NAMES, "the classes").stamp)
    rows = csv.DictReader(tree.lines(_KAGGLE_TRUTH, "the classes of the validation images"))
    try:
        wnids = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"{tree.root}: {_KAGGLE_TRUTH} must hold the columns ImageId and PredictionString."
        ) from error
    return Truth(wnids, titles, tree.need(_KAGGLE_TRUTH, "the classes").stamp)


def _unpacked(packed: bytes, named: str) -> dict[str, bytes]:
    files = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                name = str(PurePosixPath(*PurePosixPath(member.name).parts[-2:]))
                if file is not None and name in (_TRUTH, _META):
                    files[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"{named} is damaged ({error}); download it again.") from error
    for name in (_TRUTH, _META):
        if name not in files:
            raise UserError(f"{named} does not hold {name}; download it again.")
    return files


def _synsets(meta: bytes, named: str) -> tuple[dict[int, str], dict[str, str]]:
    """Return the WordNet id of every number, and the readable name of every id."""
    try:
        synsets = read_matlab(meta)["synsets"]
        leaves = [synset for synset in synsets if int(synset["num_children"][0]) == 0]
        wnids = {int(synset["ILSVRC2012_ID"][0]): synset["WNID"] for synset in leaves}
        return wnids, {synset["WNID"]: synset["words"] for synset in leaves}
    except (MatlabError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{named}: {_META} cannot be used: {error}.") from error
