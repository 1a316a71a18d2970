"""How linear depth heads are trained and tested: a quick look, and three published ways.

- ``dinov3``: patch tokens of the last layer, normed; batch norm; 256 bins; SigLoss. Crops of
  416 × 544 are rotated, mirrored and coloured. Predictions for an image and its mirror image are
  averaged (DINOv3's code, arXiv 2508.10104).
- ``dinov2``: the same with the class token, without either norm, on maps enlarged four times
  (arXiv 2304.07193); its rates are not published with its code, so they are DINOv3's.
- ``pixio``: patch and class tokens, batch norm, one logit whose sigmoid is the share of the largest
  depth, SILog; windows of 256, which overlap by a third (Pixio's code pads those at borders, and
  averages the eight class tokens of its encoders; here the first counts).

In NYUv2 training cuts off the photographs' white frame, and Eigen's box is measured. pixio never
sees more than that box.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from pospre.evaluation.dense.depth.depth_data import DepthSet
from pospre.evaluation.dense.depth.depth_head import DepthHead, ShareHead
from pospre.evaluation.dense.fitting import seeded
from pospre.evaluation.dense.maps import FeatureMaps
from pospre.evaluation.dense.segmentation.crops import Showing, predict
from pospre.model.model import PretrainModel

Box = tuple[slice, slice]
Sides = tuple[int, int]
EIGEN: Box = slice(45, 471), slice(41, 601)  # of NYUv2, what is measured (Eigen et al. 2014)
_FRAMED: Box = slice(45, 472), slice(43, 608)  # without the white frame
_GAMMA, _BRIGHTNESS, _COLOUR = (0.9, 1.1), (0.75, 1.25), (0.9, 1.1)


@dataclass(frozen=True)
class Protocol:
    """A way to train and test.

    Attributes:
        iterations: steps.
        epochs: instead of steps.
        crop: of training; None: whole images, encoded once.
        is_share: a sigmoid's share of the largest depth instead of bins.
        norm: whether the encoder's final norm is applied to the maps.
        class_token: whether it follows each patch token.
        normed: batch norm before the convolution.
        enlarged: factor by which maps are enlarged.
    """

    iterations: int = 38_400
    epochs: int | None = None
    batch_size: int = 16
    lr: float = 3e-4
    crop: Sides | None = (416, 544)
    is_share: bool = False
    norm: bool = True
    class_token: bool = False
    normed: bool = True
    enlarged: int = 1

    def maps(self, model: PretrainModel, layers: tuple[int, ...]) -> FeatureMaps:
        """Return the maps that the head reads."""
        return FeatureMaps(model, layers, norm=self.norm, class_token=self.class_token)

    def head(self, maps: FeatureMaps, max_depth: float) -> nn.Module:
        """Return a new head."""
        dim = maps.model.encoder.embed_dim * len(maps.layers) * (1 + self.class_token)
        if self.is_share:
            return ShareHead(dim, max_depth)
        return DepthHead(dim, max_depth, normed=self.normed, enlarged=self.enlarged)

    def optimizer(
        self, head: nn.Module, lr: float, iterations: int
    ) -> tuple[Optimizer, LRScheduler]:
        """Return AdamW and its schedule: one cycle, or a warm-up and a power of 0.9."""
        if not self.is_share:
            cycled = AdamW(head.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4)
            return cycled, OneCycleLR(cycled, lr, iterations, pct_start=1 / 3)
        optimizer = AdamW(head.parameters(), lr=lr, weight_decay=0.01)
        rise = int(0.1 * iterations)

        def rate(step: int) -> float:
            return step / rise if step < rise else (1 - (step - rise) / (iterations - rise)) ** 0.9

        return optimizer, LambdaLR(optimizer, rate)


PROTOCOLS = {
    "look": Protocol(2000, crop=None),
    "dinov3": Protocol(),
    "dinov2": Protocol(norm=False, class_token=True, normed=False, enlarged=4),
    "pixio": Protocol(
        epochs=60, batch_size=32, lr=2e-4, crop=(256, 256), is_share=True, class_token=True
    ),
}


class DepthCrops(Dataset[tuple[Tensor, Tensor]]):
    """Random crops by (epoch, index): levels (3, h, w) from 0 to 255, and depths (h, w).

    Draws are functions of (seed, epoch, index) alone. ``augment``: half of the crops are rotated
    by up to 2.5 degrees, and half get another gamma, brightness and colour; all are mirrored at
    random.
    """

    def __init__(
        self, data: DepthSet, max_depth: float, crop: Sides, seed: int, *, augment: bool
    ) -> None:
        self.data, self.max_depth, self.crop, self.seed = data, max_depth, crop, seed
        self.augment = augment
        turned = v2.RandomRotation(2.5, interpolation=InterpolationMode.BILINEAR)
        turns = [v2.RandomApply([turned], 0.5)] if augment else []
        self.cut = v2.Compose([*turns, v2.RandomHorizontalFlip(), v2.RandomCrop(crop)])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the crop of (epoch, index)."""
        epoch, index = key
        box = whole_or(_FRAMED if self.augment else EIGEN, self.data, index)
        image = tv_tensors.Image(self.data.image(index)[:, *box])
        depth = tv_tensors.Mask(self.data.depth(index, self.max_depth)[box])
        with seeded(self.seed, epoch, index, "depth/crop"):
            image, depth = self.cut(image, depth)
            levels = image.as_subclass(Tensor).float()
            if self.augment and bool(torch.rand(()) < 0.5):
                levels = _coloured(levels)
        return levels, depth.as_subclass(Tensor)


def _coloured(levels: Tensor) -> Tensor:
    def draw(low_high: tuple[float, float], *shape: int) -> Tensor:
        return torch.empty(shape).uniform_(*low_high)

    brighter = draw(_BRIGHTNESS) * levels ** draw(_GAMMA)
    return (brighter * draw(_COLOUR, 3, 1, 1)).clamp(0, 255)


def whole_or(box: Box, data: DepthSet, index: int) -> Box:
    """Return a box of NYUv2's photographs, or the whole of another image."""
    return box if data.is_framed(index) else (slice(None), slice(None))


def depths_of(maps: FeatureMaps, head: nn.Module, images_BCHW: Tensor) -> Tensor:
    """Return depths (B, 1, H, W); images are padded to whole patches around their middle."""
    patch = maps.model.encoder.patch_size[0]
    height, width = images_BCHW.shape[-2:]
    rows, columns = -height % patch, -width % patch
    above, left = rows // 2, columns // 2
    padded = F.pad(images_BCHW, (left, columns - left, above, rows - above))
    depth: Tensor = head(torch.cat(maps(padded), 1), padded.shape[-2:])
    return depth[..., above : above + height, left : left + width]


def depths_to_measure(
    protocol: Protocol, maps: FeatureMaps, head: nn.Module, image: Tensor, box: Box, crop: Sides
) -> Tensor:
    """Return depths (h, w) of a box of an image (1, 3, H, W), which is normalised."""
    if not protocol.is_share:
        both = [depths_of(maps, head, each) for each in (image, image.flip(-1))]
        return ((both[0] + both[1].flip(-1)) / 2)[0, 0][box]
    image = image[..., *box]
    height, width = image.shape[-2:]
    image = F.pad(image, (0, max(0, crop[1] - width), 0, max(0, crop[0] - height)))
    windows = predict(lambda some: depths_of(maps, head, some), image, Showing(None, crop), 16)
    return windows[0, 0, :height, :width]
