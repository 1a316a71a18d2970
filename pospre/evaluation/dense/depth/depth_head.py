"""Linear depth heads, their losses, and the metrics of depth."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BINS, NEAREST = 256, 0.001
METRICS = ("rmse", "abs_rel", "delta1", "log10", "silog")
_FLOOR, _SMALL = 0.1, 0.001


class DepthHead(nn.Module):
    """A 1×1 convolution to logits of bins, whose weighted mean is the depth.

    Args:
        dim: width of the maps.
        max_depth: the last bin, in metres.
        normed: batch norm before the convolution.
        enlarged: factor by which maps are enlarged before it.
    """

    bins_K: Tensor

    def __init__(
        self, dim: int, max_depth: float, *, normed: bool = True, enlarged: int = 1
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(dim) if normed else nn.Identity()
        self.enlarged = enlarged
        self.project = nn.Conv2d(dim, BINS, 1)
        nn.init.normal_(self.project.weight, std=0.01)
        nn.init.zeros_(self.project.bias)  # type: ignore[arg-type]
        self.register_buffer("bins_K", torch.linspace(NEAREST, max_depth, BINS))

    def forward(self, map_BDHW: Tensor, size: tuple[int, int]) -> Tensor:
        """Return depths (B, 1, H, W) of a size."""
        if self.enlarged > 1:
            map_BDHW = F.interpolate(map_BDHW, scale_factor=self.enlarged, mode="bilinear")
        depth = expected_depth(self.project(self.norm(map_BDHW)), self.bins_K)
        return F.interpolate(depth, size, mode="bilinear")


class ShareHead(nn.Module):
    """Batch norm and a 1×1 convolution to the logit of a share of the largest depth."""

    def __init__(self, dim: int, max_depth: float) -> None:
        super().__init__()
        self.max_depth = max_depth
        self.norm, self.project = nn.BatchNorm2d(dim), nn.Conv2d(dim, 1, 1)

    def forward(self, map_BDHW: Tensor, size: tuple[int, int]) -> Tensor:
        """Return depths (B, 1, H, W) of a size."""
        logits = self.project(self.norm(map_BDHW))
        shown = F.interpolate(logits, size, mode="bilinear", align_corners=True)
        return self.max_depth * shown.sigmoid()


def expected_depth(logits_BKHW: Tensor, bins_K: Tensor) -> Tensor:
    """Return Σ w·bins, (B, 1, h, w), with weights (relu(logit) + 0.1) / Σ."""
    weights = logits_BKHW.relu() + _FLOOR
    total = (weights * bins_K.view(1, -1, 1, 1)).sum(1, keepdim=True)
    return total / weights.sum(1, keepdim=True)


def sig_loss(predicted_N: Tensor, truth_N: Tensor, *, warm: bool = False) -> Tensor:
    """Return √(var(g) + 0.15·mean(g)²) with g = ln(p + 0.001) − ln(t + 0.001).

    ``warm``: without the variance, as in the first steps.
    """
    gaps = (predicted_N + _SMALL).log() - (truth_N + _SMALL).log()
    level = 0.15 * gaps.mean().square()
    return (level if warm else level + gaps.var()).sqrt()


def silog_loss(predicted_N: Tensor, truth_N: Tensor) -> Tensor:
    """Return √(mean(g²) − 0.5·mean(g)²) with g = ln p − ln t (Eigen et al. 2014, Eq. 4)."""
    gaps = predicted_N.clamp_min(NEAREST).log() - truth_N.log()
    return (gaps.square().mean() - 0.5 * gaps.mean().square()).sqrt()


def depth_metrics(predicted_N: Tensor, truth_N: Tensor) -> Tensor:
    """Return the ``METRICS`` of one image's pixels with a truth, float64 (5,)."""
    predicted, truth = predicted_N.double(), truth_N.double()
    ratio = torch.maximum(predicted / truth, truth / predicted)
    gaps = predicted.log() - truth.log()
    return torch.stack(
        [
            (predicted - truth).square().mean().sqrt(),
            ((predicted - truth).abs() / truth).mean(),
            (ratio < 1.25).double().mean(),
            (predicted.log10() - truth.log10()).abs().mean(),
            100 * (gaps.square().mean() - gaps.mean().square()).clamp_min(0).sqrt(),
        ]
    )
