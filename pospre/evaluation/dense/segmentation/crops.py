"""Views for segmentation: windows to measure on, and crops to train on."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from pospre.errors import UserError
from pospre.evaluation.dense.fitting import seeded
from pospre.evaluation.dense.maps import FeatureMaps
from pospre.evaluation.dense.segmentation.mask_data import IGNORED, MaskSet
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel

Logits = Callable[[Tensor], Tensor]
"""Maps normalised images (B, 3, H, W) to logits (B, C, h, w)."""


class Showing(NamedTuple):
    """How images are scaled and cut into windows.

    Attributes:
        size: their short side after scaling; None: unscaled.
        window: height and width of a window.
    """

    size: int | None
    window: tuple[int, int]

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of an image after scaling."""
        factor = 1.0 if self.size is None else self.size / min(height, width)
        return round(height * factor), round(width * factor)

    def padded(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a scaled image after padding."""
        return max(height, self.window[0]), max(width, self.window[1])

    def windows(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Return the windows of a padded image, at strides of two thirds up to the border."""
        spans = [
            [slice(at, at + side) for at in _starts(length, side)]
            for length, side in zip((height, width), self.window, strict=True)
        ]
        return list(itertools.product(*spans))


def show(model: PretrainModel, pixels: Tensor, showing: Showing) -> Tensor:
    """Return an image (1, 3, H, W), normalised, scaled, and padded with 0 at the right and bottom.

    ``pixels`` are uint8 (3, H, W).
    """
    image = model.augment.normalise(pixels.unsqueeze(0).to(model.augment.mean))
    scaled = showing.scaled(*image.shape[-2:])
    image = F.interpolate(image, scaled, mode="bilinear", antialias=True)
    height, width = showing.padded(*scaled)
    return F.pad(image, (0, width - scaled[1], 0, height - scaled[0]))


def predict(logits_of: Logits, image: Tensor, showing: Showing, batch_size: int) -> Tensor:
    """Return the logits (1, C, H, W) of an image from ``show``, averaged where windows overlap."""
    windows = showing.windows(*image.shape[-2:])
    parts: list[Tensor] = []
    for start in range(0, len(windows), batch_size):
        some = [image[0, :, rows, columns] for rows, columns in windows[start : start + batch_size]]
        logits = logits_of(torch.stack(some))
        parts += F.interpolate(logits, some[0].shape[-2:], mode="bilinear").unbind()
    total = image.new_zeros(1, len(parts[0]), *image.shape[-2:])
    times = image.new_zeros(1, 1, *image.shape[-2:])
    for (rows, columns), part in zip(windows, parts, strict=True):
        total[0, :, rows, columns] += part
        times[:, :, rows, columns] += 1
    return total / times


def _starts(length: int, side: int) -> list[int]:
    last = length - side
    return [*range(0, last, max(1, round(side * 2 / 3))), last]


SCALES = (0.5, 2.0)


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Random crops by (epoch, index): uint8 (3, H, W) and int64 classes (H, W).

    ``size`` is the short side of an image before random scaling; None: its own. Smaller images are
    padded with ``fill`` and ignored pixels. Draws are functions of (seed, epoch, index) alone.
    """

    def __init__(
        self,
        masks: MaskSet,
        num_classes: int,
        size: int | None,
        crop: tuple[int, int],
        fill: tuple[int, ...],
        seed: int,
    ) -> None:
        self.masks, self.num_classes, self.size, self.seed = masks, num_classes, size, seed
        fills = {tv_tensors.Image: fill, tv_tensors.Mask: IGNORED}
        self.cut = v2.Compose(
            [v2.RandomCrop(crop, pad_if_needed=True, fill=fills), v2.RandomHorizontalFlip()]
        )

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the crop of (epoch, index)."""
        epoch, index = key
        pixels = self.masks.image(index)
        mask = tv_tensors.Mask(torch.from_numpy(self.masks.read(index, self.num_classes)))
        short = min(mask.shape) if self.size is None else self.size
        least, most = (round(short * scale) for scale in SCALES)
        with seeded(self.seed, epoch, index, "segmentation/crop"):
            scaled = v2.RandomResize(least, most + 1)(tv_tensors.Image(pixels), mask)
            image, classes = self.cut(*scaled)
        return image.as_subclass(Tensor), classes.as_subclass(Tensor)


class Encoded(Dataset[tuple[Tensor, Tensor]]):
    """Views encoded by a frozen encoder, with their labels: maps (…, D, h, w), and (H, W)."""

    def __init__(self, windows: list[tuple[Tensor, Tensor]]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the view of (epoch, index), the same in every epoch."""
        return self.windows[key[1]]

    @classmethod
    @torch.no_grad()
    def of(
        cls, context: Context, masks: MaskSet, num_classes: int, showing: Showing, maps: FeatureMaps
    ) -> "Encoded":
        """Encode all windows of a set and keep them in memory, with their classes (int64)."""
        windows: list[tuple[Tensor, Tensor]] = []
        for index in context.track(range(len(masks)), "windows", unit="img"):
            image = show(maps.model, masks.image(index), showing)
            labels = torch.from_numpy(masks.read(index, num_classes)).float()[None, None]
            rows, columns = showing.scaled(*labels.shape[-2:])
            labels = F.interpolate(labels, (rows, columns), mode="nearest-exact")
            height, width = image.shape[-2:]
            labels = F.pad(labels, (0, width - columns, 0, height - rows), value=IGNORED)
            for window in showing.windows(height, width):
                joined = torch.cat(maps(image[:, :, *window])).cpu()
                windows.append((joined, labels[0, 0, *window].long()))
                wanted = sum(each.nbytes for each in windows[-1])
                if psutil.virtual_memory().available < 4 * wanted:
                    raise UserError(
                        f"the encoded windows of {masks.address} do not fit into memory; give "
                        "augment=true, or a smaller size=…."
                    )
        return cls(windows)
