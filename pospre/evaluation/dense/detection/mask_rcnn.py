"""Mask R-CNN on a plain ViT with a simple feature pyramid (ViTDet, Li et al. 2022).

Everything except the pyramid is torchvision's. Heads, norms and levels are ViTDet's: two
convolutions for region proposals, four and a linear layer for boxes, and four for masks. Norms are
layer norms, and anchors have 1/32 to 1/2 of the image. There are no windows: every block attends to
the whole image.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from pospre.evaluation.dense.maps import FeatureMaps, four_scales

_LEVELS = ("0", "1", "2", "3")


def stride_of(patch: int) -> int:
    """Return the power of two nearest to a patch size: the stride in pixels, after scaling."""
    return int(2 ** round(math.log2(patch)))


class Pyramid(nn.Module):
    """The backbone: maps of 1/4, 1/2, 1, 2 and 4 strides from the encoder's last layer.

    torchvision's strides are powers of two. If the patch size is not (14), images are scaled by
    patch / stride before the encoder.
    """

    def __init__(self, maps: FeatureMaps, channels: int) -> None:
        super().__init__()
        self.maps, self.out_channels = maps, channels
        dim = maps.model.encoder.embed_dim
        self.norm = FrozenBatchNorm2d(dim, eps=1e-10)  # identity until it is measured
        self.scales, dims = four_scales(dim, LayerNorm2d, halve=True)
        self.smooth = nn.ModuleList([_smooth(dim, channels) for dim in dims])

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        """Return the levels by name, from fine to coarse."""
        tokens_BDhw = self.norm(self._tokens(images_BCHW))
        parts = zip(_LEVELS, self.scales, self.smooth, strict=True)
        levels = {name: smooth(scale(tokens_BDhw)) for name, scale, smooth in parts}
        return {**levels, "pool": F.max_pool2d(levels[_LEVELS[-1]], 1, 2)}

    @torch.no_grad()
    def standardize(self, batches: Iterable[Tensor]) -> None:
        """Standardise the features per channel from now on, with statistics of these images.

        This makes a frozen encoder's features independent of their scale (as in linear probes;
        ViTDet fine-tunes, and does not need it).
        """
        tokens_DM = torch.cat(
            [self._tokens(each).transpose(0, 1).flatten(1) for each in batches], 1
        )
        self.norm.running_var, self.norm.running_mean = torch.var_mean(tokens_DM, 1)

    def _tokens(self, images_BCHW: Tensor) -> Tensor:
        patch = self.maps.model.encoder.patch_size[0]
        height, width = (side * patch // stride_of(patch) for side in images_BCHW.shape[-2:])
        if (height, width) != images_BCHW.shape[-2:]:
            images_BCHW = F.interpolate(
                images_BCHW, (height, width), mode="bilinear", antialias=True
            )
        return self.maps(images_BCHW)[0]


class _Anchors(AnchorGenerator):
    """torchvision's anchors have whole pixels; this keeps small sides from rounding to 0."""

    def generate_anchors(self, *given: Any, **named: Any) -> Tensor:
        """Return the corners of an anchor of each scale and ratio, centred at 0."""
        half = super().generate_anchors(*given, **named)[:, 2:].clamp(min=0.5)
        return torch.cat([-half, half], dim=1)


def build_detector(
    maps: FeatureMaps, num_classes: int, *, size: int, channels: int, regions: int, has_masks: bool
) -> FasterRCNN:
    """Return Mask R-CNN, or Faster R-CNN without masks; see ``settings.Detection``.

    It takes images in [0, 1] whose long side is ``size``. The background is not one of the classes.
    """
    augment = maps.model.augment
    options = {
        "min_size": size,
        "max_size": size,
        "size_divisible": size,
        "image_mean": augment.mean.flatten().tolist(),
        "image_std": augment.std.flatten().tolist(),
        "rpn_anchor_generator": _Anchors(
            tuple((size / 32 * 2**level,) for level in range(5)), ((0.5, 1.0, 2.0),) * 5
        ),
        "rpn_head": RPNHead(channels, 3, conv_depth=2),
        "rpn_post_nms_top_n_train": 4 * regions,
        "rpn_post_nms_top_n_test": 2 * regions,
        "box_batch_size_per_image": regions,
        "box_roi_pool": MultiScaleRoIAlign(list(_LEVELS), 7, 2),
        "box_head": FastRCNNConvFCHead(
            (channels, 7, 7), [channels] * 4, [4 * channels], LayerNorm2d
        ),
        "box_predictor": FastRCNNPredictor(4 * channels, num_classes + 1),
    }
    if has_masks:
        options |= {
            "mask_roi_pool": MultiScaleRoIAlign(list(_LEVELS), 14, 2),
            "mask_head": MaskRCNNHeads(channels, [channels] * 4, 1, LayerNorm2d),
            "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes + 1),
        }
    kind = MaskRCNN if has_masks else FasterRCNN
    detector: FasterRCNN = kind(Pyramid(maps, channels), **options)
    return detector


def _smooth(dim: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(dim, channels, 1, bias=False),
        LayerNorm2d(channels),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        LayerNorm2d(channels),
    )
