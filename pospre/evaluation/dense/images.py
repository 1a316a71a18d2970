"""Reading of images, masks, and labels of rendered scenes for dense evaluations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from PIL import Image
from pycocotools import mask as coco_mask
from torch import Tensor

from pospre.errors import UserError
from pospre.untrusted_json import parse_object


@contextmanager
def _opened(path: Path, what: str = "image") -> Iterator[Image.Image]:
    """Open an image file, and turn read errors into ``UserError``."""
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} is not a readable {what} ({error}); replace it, or leave it out."
        ) from error


def read_image(path: Path) -> Tensor:
    """Return the pixels of an image file, uint8 RGB (3, H, W)."""
    with _opened(path) as image:
        return torch.tensor(np.asarray(image.convert("RGB"))).permute(2, 0, 1)


def image_sides(path: Path) -> tuple[int, int]:
    """Return height and width of an image file, reading only its header."""
    with _opened(path) as image:
        return image.height, image.width


def read_mask(path: Path) -> ndarray:
    """Return the values of a mask file, int64 (H, W)."""
    with _opened(path, "mask") as image:
        values = np.asarray(image)
    if values.ndim != 2:
        raise UserError(
            f"{path} has {values.shape[2]} channels; a mask is a grey or indexed PNG of class ids."
        )
    return values.astype(np.int64)


def check_apart(train: Sequence[Path], val: Sequence[Path], address: str) -> None:
    """Raise a ``UserError`` if the data set ``address`` has images of the training split."""
    if {path.resolve() for path in train} & {path.resolve() for path in val}:
        raise UserError(
            f"{address} would be measured on training images; give another split=…, "
            "train_split=… or bank=…."
        )


def check_not_smaller(path: Path, sides: Sequence[float], patch: int) -> None:
    """Raise a ``UserError`` for an image that is smaller than a patch."""
    if min(sides) < patch:
        raise UserError(
            f"{path} has {sides[0]:.0f}×{sides[1]:.0f} pixels after scaling, less than a patch "
            f"of {patch}; give a larger size=…, or leave it out."
        )


LABELS = "labels.jsonl"
SCENE_CLASSES = ("ball", "box", "cone", "cylinder", "ring", "tree")


def scene_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the label lines of rendered scenes, whose pictures exist."""
    lines = []
    text = (folder / LABELS).read_text(encoding="utf-8").splitlines()
    for number, row in enumerate(text, start=1):
        try:
            line = parse_object(row)
            items = line["objects"]
            known = all(item["class"] in SCENE_CLASSES and "mask" in item for item in items)
            path = folder / line["path"]
        except (ValueError, KeyError, TypeError) as error:
            known, path = False, folder / str(error)
        if not known:
            raise UserError(
                f"{folder / LABELS}, line {number}, is not a line of rendered scenes with the "
                f"classes {', '.join(SCENE_CLASSES)}; render them again: python -m "
                "data_prep.scenes."
            )
        if not path.is_file():
            raise UserError(f"{folder / LABELS}, line {number}: picture {path} does not exist.")
        lines.append(line)
    return lines


def read_labels(mask: Any, image: Path, value: Callable[[Any], int]) -> ndarray:
    """Return each pixel's value, int64 (H, W), in a mask file or a rendered scene's label line.

    ``value`` gives that of a scene's visible object; pixels without one are 0.
    """
    if isinstance(mask, Path):
        return read_mask(mask)
    sides = image_sides(image)
    values = np.zeros(sides, np.int64)
    for item in mask["objects"]:
        shown = coco_mask.decode(coco_mask.frPyObjects(item["mask"], *sides))
        values[shown.astype(bool)] = value(item)
    return values
