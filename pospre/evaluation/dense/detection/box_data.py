"""Images with boxes, and optionally masks: data set layouts and their checks.

Supported are COCO (``annotations/instances_<split>.json`` beside ``<split>/`` or ``images/``; the
year may follow the split's name), Pascal VOC (``ImageSets/Main/<split>.txt``,
``Annotations/*.xml``, ``JPEGImages/``), and rendered scenes (``data_prep.scenes``).
"""

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy import ndarray
from pycocotools import mask as coco_mask
from tqdm import tqdm

from pospre.data.stores.description import first_other
from pospre.errors import UserError
from pospre.evaluation.dense.images import LABELS, SCENE_CLASSES, image_sides, scene_lines
from pospre.untrusted_json import parse_object

_IMAGES = (".jpg", ".jpeg", ".png", ".JPEG", ".JPG")


@dataclass(frozen=True)
class Item:
    """An object in an image.

    Attributes:
        box: x0, y0, x1, y1 in pixels, within the image.
        label: class, from 1.
        crowd: many objects (COCO) or difficult (VOC): not trained on, and ignored in measurement.
        area: area in pixels, of the mask if there is one.
        mask: compressed run lengths in pycocotools' format.
    """

    box: tuple[float, float, float, float]
    label: int
    crowd: bool
    area: float
    mask: Mapping[str, Any] | None

    def read_mask(self) -> ndarray:
        """Return the mask, uint8 (H, W)."""
        assert self.mask is not None
        try:
            mask: ndarray = coco_mask.decode(self.mask)
        except ValueError as error:
            size = "x".join(map(str, self.mask["size"]))
            raise UserError(f"the run lengths of a mask do not fit its {size} pixels.") from error
        return mask


@dataclass
class BoxSet:
    """A split of a data set.

    Attributes:
        address: for messages.
        classes: names; label 1 is the first.
        sides: height and width of each image.
        dropped: number of boxes without area within their image, which are left out.
    """

    address: str
    classes: Sequence[str]
    images: list[Path] = field(default_factory=list)
    sides: list[tuple[int, int]] = field(default_factory=list)
    items: list[list[Item]] = field(default_factory=list)
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def add_image(self, file: Path, annotation: Path) -> tuple[int, int]:
        """Add an image without objects, described by ``annotation``; return height and width."""
        if not file.is_file():
            raise UserError(f"{annotation} describes {file}, which does not exist.")
        self.images.append(file)
        self.sides.append(image_sides(file))
        self.items.append([])
        return self.sides[-1]

    def add(
        self,
        box: Sequence[float],
        label: int,
        *,
        place: int = -1,
        crowd: bool = False,
        area: float | None = None,
        mask: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an object to the image at ``place``, with its box clipped to the image."""
        height, width = self.sides[place]
        x0, x1 = (min(max(float(x), 0.0), float(width)) for x in box[::2])
        y0, y1 = (min(max(float(y), 0.0), float(height)) for y in box[1::2])
        if x1 <= x0 or y1 <= y0:
            self.dropped += 1
            return
        area = area or (x1 - x0) * (y1 - y0)
        self.items[place].append(Item((x0, y0, x1, y1), label, crowd, area, mask))

    @property
    def has_masks(self) -> bool:
        """Whether every object has a mask."""
        return all(item.mask is not None for items in self.items for item in items)

    def coco(self) -> dict[str, Any]:
        """Return COCO annotations; ids count from 1, in the order of images."""
        placed = [(place, item) for place, row in enumerate(self.items, start=1) for item in row]
        annotations = [
            {
                "id": number,
                "image_id": place,
                "category_id": item.label,
                "bbox": [*item.box[:2], item.box[2] - item.box[0], item.box[3] - item.box[1]],
                "area": item.area,
                "iscrowd": int(item.crowd),
                **({} if item.mask is None else {"segmentation": item.mask}),
            }
            for number, (place, item) in enumerate(placed, start=1)
        ]
        return {
            "images": [
                {"id": number, "height": height, "width": width}
                for number, (height, width) in enumerate(self.sides, start=1)
            ],
            "categories": [
                {"id": label, "name": name} for label, name in enumerate(self.classes, start=1)
            ],
            "annotations": annotations,
        }


def open_boxes(root: str, split: str, classes: Sequence[str] | None = None) -> BoxSet:
    """Open a split's images and annotations; its classes must be those of the training split."""
    base = Path(root)
    listed = sorted((base / "annotations").glob(f"instances_{split}*.json"))
    if listed:
        found = _coco(base, listed[0])
    elif (base / "ImageSets" / "Main" / f"{split}.txt").is_file():
        found = _voc(base, split, classes)
    else:
        folders = [folder for folder in (base / split, base) if (folder / LABELS).is_file()]
        if not folders:
            raise UserError(
                f"{root} has no split '{split}' of images with boxes; give a folder with "
                f"annotations/instances_{split}.json (COCO), with ImageSets/Main/{split}.txt, "
                "Annotations and JPEGImages (Pascal VOC), or rendered scenes."
            )
        found = _scenes(folders[0])
    if classes is not None and list(found.classes) != list(classes):
        raise UserError(
            f"{found.address} has other classes than the training split (first difference: "
            f"{first_other(found.classes, classes)}); both need the same."
        )
    if not any(found.items):
        raise UserError(f"{found.address} has no boxes.")
    return found


def _coco(base: Path, path: Path) -> BoxSet:
    name = path.stem.removeprefix("instances_")
    folder = next((base / part for part in (name, "images") if (base / part).is_dir()), None)
    if folder is None:
        raise UserError(f"{path} needs its images in {base / name} or {base / 'images'}.")
    try:
        content = parse_object(path.read_text(encoding="utf-8"))
        categories = sorted(content["categories"], key=lambda each: each["id"])
        images = sorted(content["images"], key=lambda each: each["id"])
        annotations = list(content["annotations"])
        names = [str(each["name"]) for each in categories]
        labels = {each["id"]: label for label, each in enumerate(categories, start=1)}
        places = {each["id"]: place for place, each in enumerate(images)}
        files = [folder / each["file_name"] for each in images]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a COCO annotation file ({error!r}).") from error
    found = BoxSet(str(path), names)
    bar = tqdm(files, "images", unit="img", disable=None, delay=2)
    for image, file in zip(images, bar, strict=True):
        rows, cols = found.add_image(file, path)
        told = (image.get("height") or rows, image.get("width") or cols)
        if told != (rows, cols):
            raise UserError(
                f"{path} says that {file} has height and width {told}, but it has "
                f"{(rows, cols)}, so its boxes and masks would not fit. Correct one of them."
            )
    for number, each in enumerate(annotations):
        try:
            _add_annotation(found, each, labels, places)
        except UserError as error:
            raise UserError(f"{path}: annotation {each.get('id')} {error}") from error
        except Exception as error:  # pycocotools raises a bare Exception for unknown formats
            raise UserError(
                f"{path}: annotation {number}, counted from 0, is not in COCO's format "
                f"({error!r}); correct or remove it."
            ) from error
    return found


def _add_annotation(
    found: BoxSet, each: dict[str, Any], labels: Mapping[Any, int], places: Mapping[Any, int]
) -> None:
    if each.get("category_id") not in labels:
        known = ", ".join(map(str, labels))
        raise UserError(f"has the category {each.get('category_id')}; known are {known}.")
    if each.get("image_id") not in places:
        raise UserError(f"is on the image {each.get('image_id')}, which is not listed.")
    try:
        x, y, width, height = (float(number) for number in each["bbox"])
    except (KeyError, TypeError, ValueError):
        x = y = width = height = math.nan
    if not all(map(math.isfinite, (x, y, width, height))):
        raise UserError("has no bbox of four numbers; add it.")
    place = places[each["image_id"]]
    found.add(
        (x, y, x + width, y + height),
        labels[each["category_id"]],
        place=place,
        crowd=bool(each.get("iscrowd", 0)),
        area=each.get("area"),
        mask=_coco_mask(each.get("segmentation"), *found.sides[place]),
    )


def _coco_mask(given: Any, height: int, width: int) -> Mapping[str, Any] | None:
    """Return compressed run lengths from polygons or from either kind of run lengths."""
    if not given:
        return None
    runs = given if isinstance(given, dict) and isinstance(given["counts"], str | bytes) else None
    if runs is None:
        runs = coco_mask.frPyObjects(given, height, width)
    merged: Mapping[str, Any] = coco_mask.merge(runs) if isinstance(runs, list) else runs
    if list(merged["size"]) != [height, width]:
        raise ValueError(f"a mask of {merged['size']} on an image of {height} x {width}")
    return merged


def _voc(base: Path, split: str, classes: Sequence[str] | None) -> BoxSet:
    listed = base / "ImageSets" / "Main" / f"{split}.txt"
    names = [line.split()[0] for line in listed.read_text(encoding="utf-8").splitlines() if line]
    paths = [base / "Annotations" / f"{name}.xml" for name in names]
    objects = [_voc_objects(path) for path in paths]
    known = list(classes or sorted({name for some in objects for name, *_ in some}))
    found = BoxSet(f"{base} ({split})", known)
    for name, path, some in zip(names, paths, objects, strict=True):
        images = [base / "JPEGImages" / f"{name}{suffix}" for suffix in _IMAGES]
        found.add_image(next((image for image in images if image.is_file()), images[0]), path)
        for kind, box, difficult in some:
            if kind not in known:
                raise UserError(f"{path} has the class '{kind}'; known are {', '.join(known)}.")
            found.add(box, known.index(kind) + 1, crowd=difficult)
    return found


def _voc_objects(path: Path) -> list[tuple[str, tuple[float, float, float, float], bool]]:
    """Return each object's class, box, and whether it is difficult."""
    try:
        tree = ElementTree.parse(path)
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"{path} is not a readable annotation ({error}).") from error
    found = []
    for number, item in enumerate(tree.iter("object"), start=1):
        texts = [item.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
        try:
            x0, y0, x1, y1 = (float(str(text)) for text in texts)
        except ValueError:
            raise UserError(
                f"{path}, object {number}, has no bndbox of four numbers; add it."
            ) from None
        difficult = (item.findtext("difficult") or "0").strip() == "1"
        # VOC counts pixels from 1, and x1, y1 are inclusive
        found.append(((item.findtext("name") or "").strip(), (x0 - 1, y0 - 1, x1, y1), difficult))
    return found


def _scenes(folder: Path) -> BoxSet:
    found = BoxSet(str(folder), SCENE_CLASSES)
    for line in scene_lines(folder):
        sides = found.add_image(folder / line["path"], folder / LABELS)
        for item in line["objects"]:
            label, mask = SCENE_CLASSES.index(item["class"]) + 1, _coco_mask(item["mask"], *sides)
            found.add(item["box"], label, area=item["area"], mask=mask)
    return found
