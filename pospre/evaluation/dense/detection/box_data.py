"""Images with boxes, and optionally masks: data set layouts and their checks.

Supported are COCO (``annotations/instances_<split>.json`` beside ``<split>/`` or ``images/``; the
year may follow the split's name), Pascal VOC (``ImageSets/Main/<split>.txt``,
``Annotations/*.xml``, ``JPEGImages/``), and rendered scenes (``data_prep.scenes``).
"""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycocotools import mask as coco_mask
from tqdm import tqdm

from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.data.stores.description import first_other
from pospre.errors import UserError
from pospre.evaluation.dense.detection.box_set import BoxSet
from pospre.evaluation.dense.images import (
    LABELS,
    SCENE_CLASSES,
    files_by_stem,
    scene_folder,
    scene_lines,
)
from pospre.text_lists import read_list
from pospre.untrusted_json import parse_object


def open_boxes(
    root: str, split: str, classes: Sequence[str] | None = None, *, decoding: Decoding = RGB
) -> BoxSet:
    """Open a split's images and annotations; its classes must be those of the training split."""
    base = Path(root)
    listed = sorted((base / "annotations").glob(f"instances_{split}*.json"))
    if listed:
        boxes = _coco(base, listed[0], decoding)
    elif (base / "ImageSets" / "Main" / f"{split}.txt").is_file():
        boxes = _voc(base, split, classes, decoding)
    else:
        folder = scene_folder(base, split)
        if folder is None:
            raise UserError(
                f"{root} has no split '{split}' of images with boxes; give a folder with "
                f"annotations/instances_{split}.json (COCO), with ImageSets/Main/{split}.txt, "
                "Annotations and JPEGImages (Pascal VOC), or rendered scenes."
            )
        boxes = _scenes(folder, decoding)
    if classes is not None and list(boxes.classes) != list(classes):
        raise UserError(
            f"{boxes.address} has other classes than the training split (first difference: "
            f"{first_other(boxes.classes, classes)}); both need the same."
        )
    if not any(boxes.items):
        raise UserError(f"{boxes.address} has no boxes.")
    return boxes


def _coco(base: Path, path: Path, decoding: Decoding) -> BoxSet:
    name = path.stem.removeprefix("instances_")
    folder = next((base / part for part in (name, "images") if (base / part).is_dir()), None)
    if folder is None:
        raise UserError(f"{path} needs its images in {base / name} or {base / 'images'}.")
    try:
        content = parse_object(path.read_bytes())
        categories, images = (_by_id(content, key, path) for key in ("categories", "images"))
        annotations = list(content["annotations"])
        names = [str(each["name"] or "").strip() for each in categories.values()]
        labels = {number: label for label, number in enumerate(categories, start=1)}
        indices = {number: image for image, number in enumerate(images)}
        files = [folder / each["file_name"] for each in images.values()]
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a COCO annotation file ({error!r}); correct it or export it again."
        ) from error
    if not all(names):
        raise UserError(f"{path}: category {[*labels][names.index('')]} has no name; add it.")
    boxes = BoxSet(str(path), names, decoding)
    bar = tqdm(files, "images", unit="img", disable=None, delay=2)
    for image, file in zip(images.values(), bar, strict=True):
        boxes.add_image(file, path, image.get("height"), image.get("width"))
    for number, each in enumerate(annotations):
        try:
            _add_annotation(boxes, each, labels, indices)
        except UserError as error:
            raise UserError(f"{path}: annotation {each.get('id')} {error}") from error
        except Exception as error:  # pycocotools raises a bare Exception for unknown formats
            raise UserError(
                f"{path}: annotation {number}, counted from 0, is not in COCO's format "
                f"({error!r}); correct or remove it."
            ) from error
    return boxes


def _by_id(content: dict[str, Any], key: str, path: Path) -> dict[Any, dict[str, Any]]:
    """Return the entries of a list by their ids, which are sorted; ``UserError`` for one twice."""
    entries = sorted(content[key], key=lambda each: each["id"])
    by_id = {each["id"]: each for each in entries}
    if len(by_id) < len(entries):
        twice = next(a["id"] for a, b in pairwise(entries) if a["id"] == b["id"])
        raise UserError(f"{path}: the id {twice} is twice in {key}; give each its own.")
    return by_id


def _add_annotation(
    boxes: BoxSet, each: dict[str, Any], labels: Mapping[Any, int], indices: Mapping[Any, int]
) -> None:
    if each.get("category_id") not in labels:
        known = ", ".join(map(str, labels))
        raise UserError(f"has the category {each.get('category_id')}; known are {known}.")
    if each.get("image_id") not in indices:
        raise UserError(f"is on the image {each.get('image_id')}, which is not listed.")
    x, y, width, height = _four_numbers(each.get("bbox"), "bbox")
    image = indices[each["image_id"]]
    boxes.add(
        (x, y, x + width, y + height),
        labels[each["category_id"]],
        image=image,
        crowd=_is_true(each.get("iscrowd"), "iscrowd"),
        area=_area(each.get("area")),
        mask=_coco_mask(each.get("segmentation"), *boxes.sides[image]),
    )


def _four_numbers(given: Any, key: str) -> tuple[float, float, float, float]:
    try:
        a, b, c, d = map(float, given)
    except (TypeError, ValueError):
        a = b = c = d = math.nan
    if not all(map(math.isfinite, (a, b, c, d))):
        raise UserError(f"has no {key} of four numbers; add it.")
    return a, b, c, d


def _is_true(given: Any, key: str) -> bool:
    """Return a mark that programs write as a number, a truth value or text; none is false."""
    word = str(given or 0).strip().lower()
    if word in ("true", "yes", "1", "1.0"):
        return True
    if word in ("false", "no", "0", "0.0", ""):
        return False
    raise UserError(f"has {key} {given!r}; write 1 or 0.")


def _area(given: Any) -> float:
    """Return the area that an annotation notes; 0: none."""
    area = float(given or 0)
    if not 0 <= area < math.inf:
        raise UserError(f"has the area {given}; give a number of pixels, or leave it out.")
    return area


def _coco_mask(given: Any, height: int, width: int) -> Mapping[str, Any] | None:
    """Return compressed run lengths from polygons or from either kind of run lengths."""
    if not given:
        return None
    if isinstance(given, list):  # pycocotools takes four numbers for a box
        given = given if isinstance(given[0], list) else [given]
        for polygon in given:
            if len(polygon) % 2 or len(polygon) < 6:
                raise UserError(
                    f"has a polygon of {len(polygon)} numbers; it needs x and y of three or more "
                    "points. Correct or remove the polygon."
                )
    runs = given if isinstance(given, dict) and isinstance(given["counts"], str | bytes) else None
    if runs is None:
        runs = coco_mask.frPyObjects(given, height, width)
    merged: Mapping[str, Any] = coco_mask.merge(runs) if isinstance(runs, list) else runs
    if list(merged["size"]) != [height, width]:
        raise ValueError(f"a mask of {merged['size']} on an image of {height} x {width}")
    return merged


def _voc(base: Path, split: str, classes: Sequence[str] | None, decoding: Decoding) -> BoxSet:
    listed = base / "ImageSets" / "Main" / f"{split}.txt"
    names = [*dict.fromkeys(line.split()[0] for line in read_list(listed))]  # each once
    paths = [base / "Annotations" / f"{name}.xml" for name in names]
    trees = [_voc_tree(path) for path in paths]
    objects = [_voc_objects(tree, path) for tree, path in zip(trees, paths, strict=True)]
    known = list(classes or sorted({name for some in objects for name, *_ in some}))
    images = files_by_stem(base / "JPEGImages")
    boxes = BoxSet(f"{base} ({split})", known, decoding)
    for name, path, tree, some in zip(names, paths, trees, objects, strict=True):
        image = images.get(name, base / "JPEGImages" / f"{name}.jpg")
        boxes.add_image(image, path, *(_voc_side(tree, key) for key in ("height", "width")))
        for kind, box, difficult in some:
            if kind not in known:
                raise UserError(f"{path} has the class '{kind}'; known are {', '.join(known)}.")
            boxes.add(box, known.index(kind) + 1, crowd=difficult)
    return boxes


def _voc_tree(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"{path} is not a readable annotation ({error}).") from error


def _voc_side(tree: ElementTree.Element, key: str) -> int | None:
    """Return the ``height`` or ``width`` that an annotation notes; None if it notes none."""
    text = (tree.findtext(f"size/{key}") or "").strip()
    return int(text) if text.isdecimal() else None


def _voc_objects(
    tree: ElementTree.Element, path: Path
) -> list[tuple[str, tuple[float, float, float, float], bool]]:
    """Return each object's class, box, and whether it is difficult."""
    objects = []
    for number, item in enumerate(tree.iter("object"), start=1):
        texts = [item.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
        name = (item.findtext("name") or "").strip()
        try:
            x0, y0, x1, y1 = _four_numbers(texts, "bndbox")
            difficult = _is_true(item.findtext("difficult"), "difficult")
            if not name:
                raise UserError("has no name; add it, or remove the object.")
        except UserError as error:
            raise UserError(f"{path}, object {number}, {error}") from None
        # VOC counts pixels from 1, and x1, y1 are inclusive
        objects.append((name, (x0 - 1, y0 - 1, x1, y1), difficult))
    return objects


def _scenes(folder: Path, decoding: Decoding) -> BoxSet:
    boxes = BoxSet(str(folder), SCENE_CLASSES, decoding)
    for line in scene_lines(folder):
        sides = boxes.add_image(folder / line["path"], folder / LABELS)
        for item in line["objects"]:
            label, mask = SCENE_CLASSES.index(item["class"]) + 1, _coco_mask(item["mask"], *sides)
            boxes.add(item["box"], label, area=item["area"], mask=mask)
    return boxes
