"""The linear depth head of DINOv3's protocol, its loss, and the metrics of depth."""

import torch
from torch import Tensor, nn

BINS, NEAREST = 256, 0.001
METRICS = ("rmse", "abs_rel", "delta1", "log10", "silog")
_FLOOR, _SMALL = 0.1, 0.001


class DepthHead(nn.Module):
    """Batch norm and a 1×1 convolution to logits of bins; depth is their weighted mean."""

    bins_K: Tensor

    def __init__(self, dim: int, max_depth: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(dim)
        self.project = nn.Conv2d(dim, BINS, 1)
        nn.init.normal_(self.project.weight, std=0.01)
        nn.init.zeros_(self.project.bias)  # type: ignore[arg-type]
        self.register_buffer("bins_K", torch.linspace(NEAREST, max_depth, BINS))

    def forward(self, map_BDHW: Tensor) -> Tensor:
        """Return depths (B, 1, h, w)."""
        return expected_depth(self.project(self.norm(map_BDHW)), self.bins_K)


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
