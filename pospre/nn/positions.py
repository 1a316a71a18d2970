"""Positions of a grid: the fixed sin-cos table in the order of MAE's weights, and soft labels."""

import torch
from torch import Tensor

from pospre.errors import UserError


def sincos_positions(dim: int, rows: int, cols: int) -> Tensor:
    """Return the sin-cos position vectors of a grid, row-major.

    With q = dim/4 and w_k = 10000^(-k/q), the vector of the token at (row r, column c) is
    ``[sin(c·w), cos(c·w), sin(r·w), cos(r·w)]``: the column comes first, as in the published MAE
    weights (timm's own table has the row first).

    Args:
        dim: width of a vector, a multiple of 4.
        rows: grid height in tokens.
        cols: grid width in tokens.

    Returns:
        float32 (rows·cols, dim), computed in float64.
    """
    if dim % 4:
        raise UserError(f"sin-cos positions need a width that 4 divides, not {dim}.")
    quarter = dim // 4
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    row, col = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64),
        torch.arange(cols, dtype=torch.float64),
        indexing="ij",
    )
    angles = [axis.reshape(-1, 1) * frequencies for axis in (col, row)]
    return torch.cat(
        [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], 1
    ).float()


def grid_distances(rows: int, cols: int, *, squared: bool) -> Tensor:
    """Return float32 (N, N) distances between grid positions, in patches."""
    row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    place = torch.stack([row.flatten(), col.flatten()], dim=1).double()
    distance = (place[:, None] - place[None]).square().sum(-1)
    return (distance if squared else distance.sqrt()).float()


def smoothed_labels(distance_NN: Tensor, sigma: Tensor, *, official: bool = False) -> Tensor:
    """Return the soft target of every position: (N, N), row y for true position y.

    The weight of a position falls with its distance d as exp(−d/σ²) (DropPos, Eq. 5); rows sum
    to 1. ``official`` normalises columns instead, as the published code does by mistake.
    Widths below 0.05 patches are one-hot in float32, so σ = 0 needs no branch.
    """
    exponent = -distance_NN / sigma.clamp_min(0.05).square()
    return torch.softmax(exponent, dim=0 if official else 1)
