"""ImageNet-1k: the original tars, Kaggle's folders, or train/ and val/ (class folders or flat)."""

import csv
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tqdm import tqdm

from data_prep.files.archives import Entry, InFile, InTar, tar_entries
from data_prep.files.tree import Tree
from data_prep.sources._labels import labels_of
from data_prep.sources.source import Source, image_item
from data_prep.splits import Split
from pospre.errors import UserError, needing
from pospre.scratch import scratch

_DEVKIT = "ILSVRC2012_devkit_t12"
_KAGGLE_LIST = "LOC_val_solution.csv"
_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_KAGGLE = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_EXTENSIONS = (".jpeg", ".jpg", ".png")
_WNID = re.compile(r"n\d{8}")

_Listed = tuple[list[tuple[str, Entry]], int]


class _Labels(NamedTuple):
    """Classes of validation images."""

    wnids: dict[str, str]  # by image, for instance of ILSVRC2012_val_00000001
    stamp: str  # changes with the source file


def detects(tree: Tree) -> bool:
    """Detect by the names of the tars, Kaggle's folders, or class folders with WordNet ids."""
    if tree.root.is_file():
        return tree.root.name in (_TRAIN_TAR, _VAL_TAR)
    if any(tree.find(name) for name in (_TRAIN_TAR, _VAL_TAR)) or any(map(tree.has, _KAGGLE)):
        return True
    is_tiny = tree.find("wnids.txt") is not None
    return not is_tiny and tree.has("val") and any(map(_WNID.fullmatch, tree.names("train")))


def load(tree: Tree, split: Split) -> Source:
    """List ``train`` or ``val``; the classes are the sorted WordNet ids.

    Flat validation images need the devkit or Kaggle's lists.
    """
    beside = tree if tree.root.is_dir() else Tree(tree.root.parent)
    there = _splits(beside)
    splits = {name: where for name, where in there.items() if tree.root in (beside.root, where)}
    where = split.choose(splits, tree.root, f"{_TRAIN_TAR}, {_VAL_TAR}, {_KAGGLE[0]}, train or val")
    noted = _read_labels(beside)
    is_train = where == there.get("train")
    images, others = _train(beside, where) if is_train else _val(beside, where, noted)
    # train defines the classes, so that labels have the same meaning in both splits
    known = _class_ids(beside, there["train"]) if "train" in there else set(noted.wnids.values())
    classes = sorted(known or {wnid for wnid, _ in images})
    labels = labels_of(classes)
    items = []
    for wnid, entry in images:
        if wnid not in labels:
            raise UserError(f"{tree.root}: {entry.name} has the class {wnid}, which train lacks.")
        items.append(image_item(entry, entry.name, labels[wnid]))
    rule = where.name if isinstance(where, Path) else where
    return Source(tree.root, tuple(items), classes, others, rule, noted.stamp)


def _splits(tree: Tree) -> dict[str, Path | str]:
    """Return the location of each split: a tar, or a folder's name."""
    splits: dict[str, Path | str] = {}
    for name, tar in (("train", _TRAIN_TAR), ("val", _VAL_TAR)):
        entry = tree.find(tar)
        folders = [f"{folder}/{name}" for folder in _KAGGLE]
        folders = [folder for folder in (*folders, name) if tree.has(folder)]
        if entry is not None and isinstance(entry.location, InFile):
            splits[name] = Path(entry.location.path)
        elif folders:
            splits[name] = folders[0]
    return splits


def _class_ids(tree: Tree, where: Path | str) -> set[str]:
    """Return the classes of the training images; other files beside them are ignored."""
    if isinstance(where, Path):
        names = [entry.name.removesuffix(".tar") for entry in tar_entries(where)]
    else:
        names = [name for name in tree.names(where) if tree.has(f"{where}/{name}")]
    return set(filter(_WNID.fullmatch, names))


def _train(tree: Tree, where: Path | str) -> _Listed:
    """Return the training images with their classes, sorted, and the number of other files."""
    if not isinstance(where, Path):
        return _in_class_folders(tree, where)
    listed = []
    tars = sorted(tar_entries(where), key=lambda entry: entry.name)
    for tar in tqdm(tars, unit="class", desc="index", disable=None):
        wnid = tar.name.removesuffix(".tar")
        if not _WNID.fullmatch(wnid) or not isinstance(tar.location, InTar):
            raise UserError(f"{where} must hold a tar per class, but there is {tar.name}.")
        images = tar_entries(where, inner=tar.location)
        for image in sorted(images, key=lambda entry: entry.name):
            listed.append((wnid, replace(image, name=f"{wnid}/{image.name}")))
    return listed, 0


def _val(tree: Tree, where: Path | str, labels: _Labels) -> _Listed:
    """Return the validation images with their classes, sorted, and the number of other files."""
    others = 0
    if isinstance(where, Path):
        entries = sorted(tar_entries(where), key=lambda entry: entry.name)
    elif any(map(_WNID.fullmatch, tree.names(where))):
        return _in_class_folders(tree, where)
    else:
        below = tree.below(where)
        entries = [entry for entry in below if _is_image(entry)]
        others = len(below) - len(entries)
    if not labels.wnids:
        raise UserError(
            f"{where}: the classes of the validation images are unknown; put {_DEVKIT}.tar.gz (or "
            "Kaggle's LOC_val_solution.csv) beside them."
        )
    stems = [PurePosixPath(entry.name).stem for entry in entries]
    for stem in stems:
        if stem not in labels.wnids:
            raise UserError(f"{where}: the class of the validation image {stem} is unknown.")
    images = [(labels.wnids[stem], entry) for stem, entry in zip(stems, entries, strict=True)]
    return images, others


def _in_class_folders(tree: Tree, where: str) -> _Listed:
    images = []
    below = tree.below(where)
    for entry in below:
        folder, _, name = entry.name.removeprefix(f"{where}/").partition("/")
        if name and _WNID.fullmatch(folder) and _is_image(entry):
            images.append((folder, entry))
    return images, len(below) - len(images)


def _is_image(entry: Entry) -> bool:
    return entry.name.lower().endswith(_EXTENSIONS)


def _read_labels(tree: Tree) -> _Labels:
    """Return the labels found beside the images; empty if there are none."""
    if tree.find(_KAGGLE_LIST) is not None:
        return _by_kaggle(tree)
    archive = tree.find(f"{_DEVKIT}.tar.gz")
    return _by_devkit(tree, archive) if archive is not None else _Labels({}, "")


def _by_devkit(tree: Tree, archive: Entry) -> _Labels:
    with needing("convert", archive.name):
        import_module("scipy")  # torchvision uses it
    from torchvision.datasets.imagenet import load_meta_file, parse_devkit_archive

    with scratch() as folder:
        (folder / archive.name).write_bytes(archive.location.read())
        try:
            parse_devkit_archive(folder)
        except RuntimeError as error:
            raise UserError(
                f"{tree.root}/{archive.name} is not the file that ImageNet offers (its MD5 "
                "differs); download it again."
            ) from error
        _, wnids = load_meta_file(folder)
    images = {f"ILSVRC2012_val_{number:08d}": wnid for number, wnid in enumerate(wnids, start=1)}
    return _Labels(images, archive.stamp)


def _by_kaggle(tree: Tree) -> _Labels:
    what = "the classes of the validation images"
    rows = csv.DictReader(tree.lines(_KAGGLE_LIST, what))
    try:
        wnids = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (csv.Error, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"{tree.root}: {_KAGGLE_LIST} must have the columns ImageId and PredictionString."
        ) from error
    return _Labels(wnids, tree.need(_KAGGLE_LIST, what).stamp)
