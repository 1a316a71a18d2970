"""Grids of patches: distances of their cells, and interpolation between them."""

from typing import Literal

import torch
from torch import Tensor

Interpolation = Literal["bicubic", "bilinear"]
_CUBIC = -0.75  # a of the kernel that torch's bicubic interpolation uses


def grid_distances(rows: int, cols: int, *, squared: bool) -> Tensor:
    """Return float32 (N, N) distances between grid positions, in patches."""
    distance = grid_offsets(rows, cols).double().square().sum(-1)
    return (distance if squared else distance.sqrt()).float()


def grid_offsets(rows: int, cols: int) -> Tensor:
    """Return int64 (N, N, 2): Δrow and Δcolumn from grid position i to position j at [i, j]."""
    place_N2 = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    return place_N2[None] - place_N2[:, None]


def interpolation_weights(centre_RN: Tensor, size: int, kind: Interpolation) -> Tensor:
    """Return the weights (R, N, size) with which points read a row of ``size`` cells.

    Cells have half-pixel centres (``align_corners=False``; the row spans [0, 1]), and borders are
    replicated. The weights equal those of ``F.grid_sample`` and, on a regular grid,
    ``F.interpolate``.
    """
    point = centre_RN * size - 0.5
    first = point.floor()
    part = point - first
    if kind == "bilinear":
        taps = {0: 1 - part, 1: part}
    else:
        taps = {-1: _outer(1 + part), 0: _inner(part), 1: _inner(1 - part), 2: _outer(2 - part)}
    cells = torch.arange(size, dtype=point.dtype, device=point.device)
    weights = torch.zeros(*point.shape, size, dtype=point.dtype, device=point.device)
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
