"""Decoders for semantic segmentation on a plain ViT: linear, and UperNet."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation as Block

from pospre.evaluation.dense.maps import four_scales

_POOLS = (1, 2, 3, 6)
_AUXILIARY_LEVEL, _AUXILIARY_WEIGHT, _AUXILIARY_CHANNELS = 2, 0.4, 256


class LinearDecoder(nn.Module):
    """Batch norm and a 1×1 convolution on the patch tokens of some layers, as in DINOv2."""

    def __init__(self, dim: int, num_layers: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(dim * num_layers)
        self.classify = nn.Conv2d(dim * num_layers, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return logits (B, C, h, w) of maps (B, D, h, w)."""
        logits: Tensor = self.classify(self.norm(torch.cat(list(maps), dim=1)))
        return logits

    def loss(self, maps: Sequence[Tensor], classes_BHW: Tensor) -> Tensor:
        """Return the cross-entropy over labelled pixels."""
        return _cross_entropy(self(maps), classes_BHW)


class UperNet(nn.Module):
    """UperNet (Xiao et al. 2018) on four layers of a ViT at four scales, as in BEiT and MAE.

    The pooled top level is merged with three lateral ones from top to bottom. All four are
    smoothed, concatenated and classified at 4 × the tokens' resolution. In training an auxiliary
    convolution on the third level also classifies, with weight 0.4. For ViT-B, 512 channels are
    published.
    """

    def __init__(
        self, dim: int, num_classes: int, channels: int = 512, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.scales, dims = four_scales(dim, nn.BatchNorm2d, halve=False)
        self.pools = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(side), Block(dim, channels, 1)) for side in _POOLS]
        )
        self.top = Block(dim + len(_POOLS) * channels, channels, 3)
        self.lateral = nn.ModuleList([Block(width, channels, 1) for width in dims[:-1]])
        self.smooth = nn.ModuleList([Block(channels, channels, 3) for _ in dims[:-1]])
        self.fuse = Block(len(dims) * channels, channels, 3)
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, num_classes, 1))
        self.auxiliary = nn.Sequential(
            Block(dim, _AUXILIARY_CHANNELS, 3),
            nn.Dropout2d(dropout),
            nn.Conv2d(_AUXILIARY_CHANNELS, num_classes, 1),
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return logits (B, C, 4h, 4w) of four maps (B, D, h, w)."""
        return self.decode(self.rescale(maps))

    def loss(self, maps: Sequence[Tensor], classes_BHW: Tensor) -> Tensor:
        """Return the cross-entropy over labelled pixels, of both classifiers."""
        levels = self.rescale(maps)
        auxiliary = _cross_entropy(self.auxiliary(levels[_AUXILIARY_LEVEL]), classes_BHW)
        return _cross_entropy(self.decode(levels), classes_BHW) + _AUXILIARY_WEIGHT * auxiliary

    def rescale(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the maps at 4, 2, 1 and 1/2 times their size."""
        return [scale(each) for scale, each in zip(self.scales, maps, strict=True)]

    def decode(self, levels: Sequence[Tensor]) -> Tensor:
        """Return logits at the size of the first of four levels."""
        last = levels[-1]
        pooled = [_resize(pool(last), last) for pool in self.pools]
        maps = [lateral(level) for lateral, level in zip(self.lateral, levels, strict=False)]
        maps.append(self.top(torch.cat([last, *pooled], dim=1)))
        for level in range(len(maps) - 1, 0, -1):
            maps[level - 1] = maps[level - 1] + _resize(maps[level], maps[level - 1])
        smooth = [each(level) for each, level in zip(self.smooth, maps, strict=False)]
        smooth.append(maps[-1])
        logits: Tensor = self.classify(
            self.fuse(torch.cat([_resize(each, smooth[0]) for each in smooth], dim=1))
        )
        return logits


def _resize(maps: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(maps, like.shape[-2:], mode="bilinear", align_corners=False)


def _cross_entropy(logits_BChw: Tensor, classes_BHW: Tensor) -> Tensor:
    """Return the mean over pixels of class 0 and above; 0 if there are none."""
    logits = F.interpolate(logits_BChw, classes_BHW.shape[-2:], mode="bilinear")
    total = F.cross_entropy(logits, classes_BHW, ignore_index=-1, reduction="sum")
    return total / (classes_BHW >= 0).sum().clamp_min(1)
