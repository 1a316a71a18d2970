"""Grid interpolation by matrices, whose gradients are reproducible."""

from typing import Literal

import torch
from torch import Tensor

Interpolation = Literal["bicubic", "bilinear"]
_CUBIC = -0.75  # a of the kernel that torch's bicubic interpolation uses


def interpolation_weights(centre_RN: Tensor, size: int, kind: Interpolation) -> Tensor:
    """Return the weights (R, N, size) with which points read a row of ``size`` cells.

    Cells have half-pixel centres (``align_corners=False``; the row spans [0, 1]), and borders are
    replicated. The weights equal those of ``F.grid_sample`` and, on a regular grid,
    ``F.interpolate``.
    """
    place = centre_RN * size - 0.5
    first = place.floor()
    part = place - first
    if kind == "bilinear":
        taps = {0: 1 - part, 1: part}
    else:
        taps = {-1: _outer(1 + part), 0: _inner(part), 1: _inner(1 - part), 2: _outer(2 - part)}
    cells = torch.arange(size, dtype=place.dtype, device=place.device)
    weights = torch.zeros(*place.shape, size, dtype=place.dtype, device=place.device)
    for offset, factor in taps.items():
        cell = (first + offset).clamp(0, size - 1)
        weights = weights + factor.unsqueeze(-1) * (cell.unsqueeze(-1) == cells)
    return weights


def _inner(x: Tensor) -> Tensor:
    """Return the cubic kernel for distances up to 1."""
    return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1


def _outer(x: Tensor) -> Tensor:
    """Return the cubic kernel for distances from 1 to 2."""
    return ((x - 5) * x + 8) * x * _CUBIC - 4 * _CUBIC
