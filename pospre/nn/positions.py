"""Fixed two-dimensional sin-cos positions, in the order of MAE's weights."""

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
