"""Training data of a detector: images scaled at random and cropped to a square, with objects."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from pospre.evaluation.dense.detection.box_data import BoxSet
from pospre.evaluation.dense.fitting import seeded
from pospre.evaluation.dense.images import read_image


class Jittered(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Squares by (epoch, index): large-scale jitter (Ghiasi et al. 2021) and mirroring.

    ``jitter`` is the range of the factor to the scale at which an image just fits ``size``. Draws
    are functions of (seed, epoch, index) alone. Crowds are left out.
    """

    def __init__(
        self,
        boxes: BoxSet,
        size: int,
        jitter: tuple[float, float],
        fill: tuple[int, ...],
        seed: int,
        has_masks: bool,
    ) -> None:
        self.boxes, self.seed, self.has_masks = boxes, seed, has_masks
        fills = {tv_tensors.Image: fill, tv_tensors.Mask: 0}
        self.cut = v2.Compose(
            [
                v2.ScaleJitter((size, size), jitter),
                v2.RandomCrop((size, size), pad_if_needed=True, fill=fills),
                v2.RandomHorizontalFlip(),
                v2.SanitizeBoundingBoxes(),
            ]
        )

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return uint8 (3, S, S), and boxes (x0, y0, x1, y1), labels and masks."""
        epoch, index = place
        pixels = read_image(self.boxes.images[index])
        items = [item for item in self.boxes.items[index] if not item.crowd]
        sides = self.boxes.sides[index]
        corners = torch.tensor([item.box for item in items]).reshape(-1, 4)
        target: dict[str, Tensor] = {
            "boxes": tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=sides),
            "labels": torch.tensor([item.label for item in items], dtype=torch.int64),
        }
        if self.has_masks:
            masks = np.zeros((len(items), *sides), np.uint8)
            for number, item in enumerate(items):
                masks[number] = item.read_mask()
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        with seeded(self.seed, epoch, index, "detection/jitter"):
            image, target = self.cut(tv_tensors.Image(pixels), target)
        return image.as_subclass(Tensor), {k: v.as_subclass(Tensor) for k, v in target.items()}
