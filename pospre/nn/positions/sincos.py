"""Sin-cos positions: a fixed table of sinusoids, in the order of MAE's weights.

Nothing is learned. A forgotten place gets one learned vector or nothing instead. For other grids
the table is resampled, as in MAE's fine-tuning. For views in boxes (crops of a position field), the
sinusoids are evaluated at the centres of the box's cells.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.nn.places import Places
from pospre.nn.positions.table import Table


class SinCos(Table):
    """The fixed table; the class token has no position (He et al. 2022)."""

    learns: ClassVar[bool] = False

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the sinusoids."""
        self.pos_embed.zero_()
        self.pos_embed[0, self.dims.num_prefix :] = sincos_table(self.dims.dim, *self.grid)

    def in_boxes(self, box_R4: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the sinusoids at the cell centres of boxes: float32 (R, rows·cols, dim)."""
        places = Places(grid).within(box_R4).steps(self.grid, box_R4.device)
        if self.grid[1] == 1:  # a sequence
            return sincos_at_1d(self.dims.dim, places[..., 0])
        return sincos_at(self.dims.dim, places.flip(-1))


class DecoderSinCos(SinCos):
    """The fixed table of a decoder, which is not saved."""

    def make_room(self, grid: tuple[int, int]) -> None:
        """Allocate a table of ``grid``, not filled yet."""
        count = self.dims.num_prefix + grid[0] * grid[1]
        table = torch.empty(1, count, self.dims.dim)
        self.register_buffer("pos_embed", table, persistent=False)
        self.grid = grid


class LearnedSinCos(SinCos):
    """A learned table that starts as the fixed one; the class token's row starts at 0."""

    learns: ClassVar[bool] = True
    is_drawn_larger: ClassVar[bool] = False
    in_boxes = Table.in_boxes


def sincos_positions(dim: int, rows: int, cols: int) -> Tensor:
    """Return the sin-cos position vectors of a grid, row-major: float32 (rows·cols, dim).

    With q = dim/4 and w_k = 10000^(-k/q), the vector of the token at (row r, column c) is
    ``[sin(c·w), cos(c·w), sin(r·w), cos(r·w)]``, computed in float64. The column comes first, as in
    the published MAE weights; timm's own table has the row first.
    """
    if dim % 4:
        raise UserError(f"sin-cos positions need a width divisible by 4, not {dim}.")
    places_N2 = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).double()
    return sincos_at(dim, places_N2.flip(-1)[None])[0].float()


def sincos_positions_1d(dim: int, length: int) -> Tensor:
    """Return the sinusoids of a sequence (Vaswani et al. 2017): alternating sine and cosine.

    float32 (length, dim), computed in float64.
    """
    if dim % 2:
        raise UserError(f"sin-cos positions of a sequence need an even width, not {dim}.")
    return sincos_at_1d(dim, torch.arange(length).double()[None])[0].float()


def sincos_table(dim: int, rows: int, cols: int) -> Tensor:
    """Return the sin-cos positions of a grid, or of a sequence if the grid has one column."""
    return sincos_positions_1d(dim, rows) if cols == 1 else sincos_positions(dim, rows, cols)


def is_sincos(table_ND: Tensor, rows: int, cols: int) -> bool:
    """Return whether a grid's vectors equal the sin-cos ones, within their precision."""
    error = max(1e-4, torch.finfo(table_ND.dtype).eps)  # MAE's published tables are float32
    fixed = sincos_table(table_ND.shape[1], rows, cols)
    return torch.allclose(table_ND.float(), fixed.to(table_ND.device), rtol=0, atol=error)


def sincos_at(dim: int, coordinates_BN2: Tensor) -> Tensor:
    """Return the sin-cos vectors (B, N, dim) at any coordinates; whole ones give the table's rows.

    ``coordinates_BN2`` are (column, row) in units of the grid's cells, 0 at the centre of the
    first.
    """
    quarter = dim // 4
    steps = torch.arange(quarter, dtype=torch.float64, device=coordinates_BN2.device)
    frequencies = (10000.0 ** (-steps / quarter)).to(coordinates_BN2.dtype)
    angles = coordinates_BN2.unsqueeze(-1) * frequencies  # B, N, (column, row), quarter
    return torch.stack([angles.sin(), angles.cos()], dim=3).flatten(2)


def sincos_at_1d(dim: int, places_BN: Tensor) -> Tensor:
    """Return the sinusoids (B, N, dim) of a sequence at any places, in tokens from the first."""
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=places_BN.device)
    frequencies = (10000.0 ** (-steps / half)).to(places_BN.dtype)
    angles = places_BN.unsqueeze(-1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=3).flatten(2)
