"""What ``data_prep.scenes`` writes beside its pictures: classes, boxes, masks and tracks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from pycocotools import mask as coco_mask

from pospre.errors import UserError
from pospre.untrusted_json import parse_object

LABELS = "labels.jsonl"
SCENE_CLASSES = ("ball", "box", "cone", "cylinder", "ring", "tree")


def scene_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the label lines of rendered scenes.

    Raises:
        UserError: a line cannot be read, or a picture is missing.
    """
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
                f"{folder / LABELS}, line {number}, is no line of rendered scenes with the classes "
                f"{', '.join(SCENE_CLASSES)}; render them again: python -m data_prep.scenes."
            )
        if not path.is_file():
            raise UserError(f"{folder / LABELS}, line {number}: there is no picture {path}.")
        lines.append(line)
    return lines


def painted(line: dict[str, Any], sides: tuple[int, int], value: Callable[[Any], int]) -> ndarray:
    """Return what each pixel shows, int64 (H, W): 0, or the ``value`` of the object there."""
    values = np.zeros(sides, np.int64)
    for item in line["objects"]:
        mask = coco_mask.decode(coco_mask.frPyObjects(item["mask"], *sides))
        values[mask.astype(bool)] = value(item)
    return values
