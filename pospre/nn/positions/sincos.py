"""Sin-cos positions: a fixed table of sinusoids, in the order of MAE's weights.

Nothing is learned. A forgotten place gets one learned vector or nothing instead. For other grids
the table is resampled, as in MAE's fine-tuning. For views in boxes (crops of a position field), the
sinusoids are evaluated at the centres of the box's cells.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.nn.places import box_centres
from pospre.nn.positions.table import Table


class SinCos(Table):
    """The fixed table; the class token has no position (He et al. 2022)."""

    learns: ClassVar[bool] = False

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the sinusoids."""
        self.pos_embed.zero_()
        self.pos_embed[0, self.space.num_prefix :] = sincos_table(self.space.dim, *self.grid)

    def in_boxes(self, box_R4: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the sinusoids at the cell centres of boxes: float32 (R, rows·cols, dim)."""
        row, column = box_centres(box_R4.float(), grid)
        row, column = row * self.grid[0] - 0.5, column * self.grid[1] - 0.5
        if self.grid[1] == 1:  # a sequence
            return sincos_at_1d(self.space.dim, row.repeat_interleave(grid[1], dim=1))
        places = torch.stack(
            [
                column[:, None].expand(-1, grid[0], -1),
                row[:, :, None].expand(-1, -1, grid[1]),
            ],
            dim=-1,
        )
        return sincos_at(self.space.dim, places.flatten(1, 2))


class DecoderSinCos(SinCos):
    """The fixed table of a decoder, which is not saved."""

    def make_room(self, grid: tuple[int, int]) -> None:
        """Allocate a table of ``grid``, not filled yet."""
        count = self.space.num_prefix + grid[0] * grid[1]
        table = torch.empty(1, count, self.space.dim)
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


def sincos_positions_1d(dim: int, length: int) -> Tensor:
    """Return the sinusoids of a sequence (Vaswani et al. 2017): alternating sine and cosine.

    float32 (length, dim), computed in float64.
    """
    if dim % 2:
        raise UserError(f"sin-cos positions of a sequence need an even width, not {dim}.")
    half = dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1).float()


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
    frequencies = (10000.0 ** (-steps / quarter)).float()
    angles = coordinates_BN2.float().unsqueeze(-1) * frequencies  # B, N, (column, row), quarter
    return torch.stack([angles.sin(), angles.cos()], dim=3).flatten(2)


def sincos_at_1d(dim: int, places_BN: Tensor) -> Tensor:
    """Return the sinusoids of a sequence at any places; whole ones give the table's rows.

    Args:
        dim: width of a vector, a multiple of 2.
        places_BN: float32, in tokens, 0 at the first.

    Returns:
        float32 (B, N, dim).
    """
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=places_BN.device)
    frequencies = (10000.0 ** (-steps / half)).float()
    angles = places_BN.float().unsqueeze(-1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=3).flatten(2)
