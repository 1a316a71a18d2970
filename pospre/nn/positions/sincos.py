"""Sin-cos positions: the fixed table of sinusoids, in the order of MAE's weights.

Nothing is learned. A forgotten place is one learned vector, or nothing, in place of the waves. At
another grid the table is resampled, as MAE's fine-tuning does; in a box (a crop of the position
field) the waves themselves are evaluated at the centres of its cells.
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
        """Fill in the waves."""
        self.pos_embed.zero_()
        self.pos_embed[0, self.space.num_prefix :] = sincos_table(self.space.dim, *self.grid)

    def in_boxes(self, box_R4: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the waves at the centres of the cells of boxes: float32 (R, rows·cols, dim)."""
        row, column = box_centres(box_R4.float(), grid)
        row, column = row * self.grid[0] - 0.5, column * self.grid[1] - 0.5
        places = torch.stack(
            [
                column[:, None].expand(-1, grid[0], -1),
                row[:, :, None].expand(-1, -1, grid[1]),
            ],
            dim=-1,
        )
        return sincos_at(self.space.dim, places.flatten(1, 2))


class DecoderSinCos(SinCos):
    """The fixed table of a decoder, which no file holds."""

    def make_room(self, grid: tuple[int, int]) -> None:
        """Take a table of ``grid``, which is still to be filled."""
        count = self.space.num_prefix + grid[0] * grid[1]
        table = torch.empty(1, count, self.space.dim)
        self.register_buffer("pos_embed", table, persistent=False)
        self.grid = grid


class LearnedSinCos(SinCos):
    """A table that starts as the fixed one and learns, the class token's row from 0."""

    learns: ClassVar[bool] = True
    is_drawn_larger: ClassVar[bool] = False
    in_boxes = Table.in_boxes


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


def sincos_positions_1d(dim: int, length: int) -> Tensor:
    """Return the sinusoids of a sequence (Vaswani et al. 2017): sine and cosine in turn.

    Args:
        dim: width of a vector, a multiple of 2.
        length: number of tokens.

    Returns:
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
    """Return whether a grid's vectors are the sin-cos ones, in the precision that they have."""
    error = max(1e-4, torch.finfo(table_ND.dtype).eps)  # MAE's published tables are float32
    fixed = sincos_table(table_ND.shape[1], rows, cols)
    return torch.allclose(table_ND.float(), fixed.to(table_ND.device), rtol=0, atol=error)


def sincos_at(dim: int, coordinates_BN2: Tensor) -> Tensor:
    """Return the sin-cos vectors at any coordinates: the table's at whole ones.

    Args:
        dim: width of a vector, a multiple of 4.
        coordinates_BN2: float32 (column, row) in units of the grid's cells, 0 at the centre of the
            first cell.

    Returns:
        float32 (B, N, dim).
    """
    quarter = dim // 4
    steps = torch.arange(quarter, dtype=torch.float64, device=coordinates_BN2.device)
    frequencies = (10000.0 ** (-steps / quarter)).float()
    angles = coordinates_BN2.float().unsqueeze(-1) * frequencies  # B, N, (column, row), quarter
    return torch.stack([angles.sin(), angles.cos()], dim=3).flatten(2)
