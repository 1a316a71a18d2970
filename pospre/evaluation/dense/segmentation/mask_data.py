"""Images with a class for every pixel: data set layouts and their checks.

Supported are ``<split>/images/*`` with ``<split>/masks/*.png`` (``classes.txt`` may list class
names, one per line); ADE20K's ``images/<split>/*`` with ``annotations/<split>/*.png``; and rendered
scenes (``data_prep.scenes``), whose folder is one split or has one sub-folder per split.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor
from tqdm import tqdm

from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.data.stores.image_folder import list_images
from pospre.errors import UserError
from pospre.evaluation.common_settings import Half
from pospre.evaluation.dense.images import (
    LABELS,
    SCENE_CLASSES,
    check_apart,
    image_sides,
    in_half,
    read_image,
    read_labels,
    scene_folder,
    scene_lines,
)
from pospre.text_lists import read_list, read_text

IGNORED = -1
_ALIASES = {"train": ("train", "training"), "val": ("val", "validation")}
_ADE_CLASSES = 150


@dataclass(frozen=True)
class MaskSet:
    """A split of a data set.

    Attributes:
        address: for messages.
        images: files, sorted.
        masks: for each image its mask file, or its line in the scenes' labels.
        first: the value of class 0 in a mask; lower values are ignored.
        ignored: values without a class.
        classes: names, if the layout has them.
        decoding: how images are decoded.
    """

    address: str
    images: Sequence[Path]
    masks: Sequence[Any]
    first: int
    ignored: frozenset[int]
    classes: Sequence[str] | None
    decoding: Decoding = RGB

    def __len__(self) -> int:
        return len(self.images)

    def of_half(self, half: Half | None) -> "MaskSet":
        """Return a half of the split; all of it for None."""
        images, masks = (in_half(part, half, self.address) for part in (self.images, self.masks))
        return replace(self, images=images, masks=masks)

    def image(self, index: int) -> Tensor:
        """Return an image's pixels, uint8 (3, H, W)."""
        return read_image(self.images[index], self.decoding)

    def read(self, index: int, num_classes: int) -> ndarray:
        """Return the classes of an image's pixels, int64 (H, W); ``IGNORED`` for no class."""
        values = self._values(index)
        present = np.flatnonzero(np.bincount(values.ravel()))
        table = np.full(int(present[-1]) + 1, IGNORED, np.int64)
        for value in present.tolist():
            if value in self.ignored or value < self.first:
                continue
            if value - self.first >= num_classes:
                raise UserError(
                    f"{self.name(index)} contains the id {value}; known are {self.first} to "
                    f"{self.first + num_classes - 1}, and ignored "
                    f"{', '.join(map(str, sorted(self.ignored))) or 'none'}. "
                    "Give num_classes=… or ignore=…, or correct the mask."
                )
            table[value] = value - self.first
        classes: ndarray = table[values]
        return classes

    def greatest(self) -> int:
        """Return the largest class in any mask; −1 if there is none."""
        values = (np.unique(self._values(index)) for index in range(len(self)))
        kept = (set(classes.tolist()) - self.ignored for classes in values)
        return (
            max((max(classes) for classes in kept if classes), default=self.first - 1) - self.first
        )

    def name(self, index: int) -> str:
        """Return a mask's name for messages."""
        mask = self.masks[index]
        return str(mask) if isinstance(mask, Path) else f"{self.address}/{LABELS}: {mask['path']}"

    def _values(self, index: int) -> ndarray:
        mask, image = self.masks[index], self.images[index]
        return read_labels(mask, image, lambda item: 1 + SCENE_CLASSES.index(item["class"]))


def open_masks(root: str, split: str, ignore: int | None, decoding: Decoding = RGB) -> MaskSet:
    """Find a split of a data set; ``train`` and ``val`` also stand for ADE20K's longer names.

    Pixels of the value ``ignore`` have no class; in ADE20K also those of 0.
    """
    base, names = Path(root), _ALIASES.get(split, (split,))
    ignored = frozenset() if ignore is None else frozenset([ignore])
    for name in names:
        if (base / name / "masks").is_dir():
            classes = _class_names(base / "classes.txt")
            pairs = _pairs(base / name / "images", base / name / "masks")
            return MaskSet(str(base / name), *pairs, 0, ignored, classes, decoding)
        if (base / "annotations" / name).is_dir():
            names_150 = _ade_names(base / "objectInfo150.txt")
            pairs = _pairs(base / "images" / name, base / "annotations" / name)
            return MaskSet(str(base / "images" / name), *pairs, 1, ignored, names_150, decoding)
        if folder := scene_folder(base, name):
            lines = scene_lines(folder)
            images = [folder / line["path"] for line in lines]
            names_all = ("ground and sky", *SCENE_CLASSES)
            return MaskSet(str(folder), images, lines, 0, ignored, names_all, decoding)
    raise UserError(
        f"{root} has no split '{split}' of images with masks; give a folder with "
        f"{split}/images and {split}/masks, with images/{split} and annotations/{split} (ADE20K), "
        "or rendered scenes."
    )


def _pairs(images: Path, masks: Path) -> tuple[list[Path], list[Path]]:
    """Return the images and their masks of the same names."""
    if not images.is_dir():
        raise UserError(f"{masks} contains masks, but the folder {images} does not exist.")
    files = [images / name for name in list_images(images)]
    wanted = [(masks / path.relative_to(images)).with_suffix(".png") for path in files]
    lone = next(
        (path for path, mask in zip(files, wanted, strict=True) if not mask.is_file()), None
    )
    if lone is not None:
        raise UserError(f"{lone} has no mask in {masks}; add it, or remove the image.")
    left = sorted(set(masks.rglob("*.png")) - set(wanted))
    if left:
        raise UserError(f"{left[0]} is not the mask of any image in {images}; remove it.")
    return files, wanted


def check_masks(train: MaskSet, val: MaskSet, num_classes: int) -> None:
    """Read all masks; warn about classes without training pixels or with few pixels at all."""
    check_apart(train.images, val.images, val.address)
    named = train.classes is not None and len(train.classes) != num_classes
    if named or train.classes != val.classes:
        raise UserError(
            f"{train.address} names {len(train.classes or ())} classes, {val.address} "
            f"{len(val.classes or ())}, and num_classes is {num_classes}; all three must agree."
        )
    learned, measured = (_count_pixels(part, num_classes) for part in (train, val))
    for number in np.flatnonzero((learned == 0) & (measured > 0)).tolist():
        name = f"class {number}" if train.classes is None else train.classes[number]
        print(
            f"segmentation: {val.address} contains '{name}', but no mask of {train.address} does: "
            "it cannot be learned, and counts as IoU 0",
            file=sys.stderr,
        )
    shown = np.flatnonzero(learned + measured)
    if train.classes is None and 2 * len(shown) < num_classes:
        print(
            f"segmentation: the masks contain {len(shown)} of {num_classes} classes, up to class "
            f"{shown[-1]}. If its pixels have no class, give ignore={shown[-1] + train.first}",
            file=sys.stderr,
        )


def count_classes(train: MaskSet, num_classes: int | None) -> int:
    """Return the number of classes: as given, from the layout, or from the masks."""
    if num_classes is not None:
        return num_classes
    return train.greatest() + 1 if train.classes is None else len(train.classes)


def _count_pixels(part: MaskSet, num_classes: int) -> ndarray:
    counts = np.zeros(num_classes, np.int64)
    paths = tqdm(part.images, "masks", unit="img", disable=None, delay=2)
    for index, path in enumerate(paths):
        classes = part.read(index, num_classes)
        if classes.shape != image_sides(path):
            raise UserError(
                f"{part.name(index)} is {classes.shape[1]}×{classes.shape[0]}, but {path} has "
                "another size, upright by its EXIF; a mask needs a value for every pixel."
            )
        counts += np.bincount(classes[classes >= 0], minlength=num_classes)
    if not counts.any():
        raise UserError(f"no pixel of {part.address} has a class; check ignore=….")
    return counts


def _class_names(path: Path) -> list[str] | None:
    if not path.is_file():
        return None
    names = [line.strip() for line in read_text(path).rstrip().splitlines()]
    if not all(names) or not names:  # a blank line would change the numbers of those after it
        which = f"no name in line {names.index('') + 1}" if names else "no class names"
        raise UserError(f"{path} has {which}; write one per line, or remove the file.")
    return names


def _ade_names(path: Path) -> list[str]:
    """Return the names of ADE20K's 150 classes, or their numbers where the list is not there."""
    if not path.is_file():
        return [f"class {number}" for number in range(1, _ADE_CLASSES + 1)]
    return [line.split("\t")[-1] for line in read_list(path)[1:]]
