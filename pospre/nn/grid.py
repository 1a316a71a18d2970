"""Distances between grid cells, and soft labels derived from them."""

import torch
from torch import Tensor


def grid_distances(rows: int, cols: int, *, squared: bool) -> Tensor:
    """Return float32 (N, N) distances between grid positions, in patches."""
    distance = grid_offsets(rows, cols).double().square().sum(-1)
    return (distance if squared else distance.sqrt()).float()


def grid_offsets(rows: int, cols: int) -> Tensor:
    """Return int64 (N, N, 2): Δrow and Δcolumn from grid position i to position j at [i, j]."""
    place_N2 = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    return place_N2[None] - place_N2[:, None]


def smoothed_labels(distance_NN: Tensor, sigma: Tensor, *, official: bool = False) -> Tensor:
    """Return the soft target of each position: (N, N), row y for true position y.

    The weight of a position at distance d is exp(−d/σ²) (DropPos, Eq. 5); rows sum to 1.
    ``official`` normalises columns instead, which is a mistake of the published code. Widths below
    0.05 patches give one-hot rows in float32, so σ = 0 needs no special case.
    """
    exponent = -distance_NN / sigma.clamp_min(0.05).square()
    return torch.softmax(exponent, dim=0 if official else 1)
