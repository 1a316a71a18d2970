"""The images, boxes and masks of a split, whatever their layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy import ndarray
from pycocotools import mask as coco_mask
from torch import Tensor

from pospre.data.decode.bit_depth import Decoding
from pospre.errors import UserError
from pospre.evaluation.common_settings import Half
from pospre.evaluation.dense.images import image_sides, in_half, read_image


@dataclass(frozen=True)
class Item:
    """An object in an image.

    Attributes:
        box: x0, y0, x1, y1 in pixels, within the image.
        label: class, from 1.
        crowd: many objects (COCO) or difficult (VOC): not trained on, and ignored in measurement.
        area: area in pixels: as noted, or else of the mask if there is one, or of the box.
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
        decoding: how images are decoded.
    """

    address: str
    classes: Sequence[str]
    decoding: Decoding
    images: list[Path] = field(default_factory=list)
    sides: list[tuple[int, int]] = field(default_factory=list)
    items: list[list[Item]] = field(default_factory=list)
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def of_half(self, half: Half | None) -> "BoxSet":
        """Return a half of the split; all of it for None."""
        chosen = in_half(range(len(self)), half, self.address)
        return replace(
            self,
            images=[self.images[index] for index in chosen],
            sides=[self.sides[index] for index in chosen],
            items=[self.items[index] for index in chosen],
        )

    def image(self, index: int) -> Tensor:
        """Return an image's pixels, uint8 (3, H, W)."""
        return read_image(self.images[index], self.decoding)

    def add_image(
        self, file: Path, annotation: Path, height: int | None = None, width: int | None = None
    ) -> tuple[int, int]:
        """Add an image without objects; return its height and width.

        ``annotation`` is the file that describes it, and notes these sides.
        """
        if not file.is_file():
            raise UserError(f"{annotation} describes {file}, which does not exist.")
        rows, cols = image_sides(file)
        noted = (height or rows, width or cols)
        if noted != (rows, cols):
            raise UserError(
                f"{annotation} says that {file} has height and width {noted}, but upright (by its "
                f"EXIF) it has {(rows, cols)}, so its boxes and masks would not fit. Correct one "
                "of them."
            )
        self.images.append(file)
        self.sides.append((rows, cols))
        self.items.append([])
        return rows, cols

    def add(
        self,
        box: Sequence[float],
        label: int,
        *,
        image: int = -1,
        crowd: bool = False,
        area: float | None = None,
        mask: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an object to the image at ``image``, with its box clipped to the image."""
        height, width = self.sides[image]
        x0, x1 = (min(max(float(x), 0.0), float(width)) for x in box[::2])
        y0, y1 = (min(max(float(y), 0.0), float(height)) for y in box[1::2])
        if x1 <= x0 or y1 <= y0:
            self.dropped += 1
            return
        if not area:  # 0 stands for unknown: the box has some
            box_area = (x1 - x0) * (y1 - y0)
            area = box_area if mask is None else float(coco_mask.area(mask))
        self.items[image].append(Item((x0, y0, x1, y1), label, crowd, area, mask))

    @property
    def has_masks(self) -> bool:
        """Whether every object has a mask."""
        return all(item.mask is not None for items in self.items for item in items)

    def coco(self) -> dict[str, Any]:
        """Return COCO annotations; ids count from 1, in the order of images."""
        placed = [(image, item) for image, row in enumerate(self.items, start=1) for item in row]
        annotations = [
            {
                "id": number,
                "image_id": image,
                "category_id": item.label,
                "bbox": [*item.box[:2], item.box[2] - item.box[0], item.box[3] - item.box[1]],
                "area": item.area,
                "iscrowd": int(item.crowd),
                **({} if item.mask is None else {"segmentation": item.mask}),
            }
            for number, (image, item) in enumerate(placed, start=1)
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
