"""Positions of a grid: the fixed sin-cos table in the order of MAE's weights, and soft labels."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.batch import Batch, field_box_key
from pospre.errors import UserError
from pospre.nn.interpolation import interpolation_weights

Resampling = Literal["bicubic", "antialiased", "offset"]
"""How a table is read at another grid.

``bicubic``: at the centres of the new cells (MAE, DeiT, ours). ``antialiased``: that, and a wider
kernel where the new grid is coarser (timm's ``resample_abs_pos_embed``, DINOv2 with registers).
``offset``: cells are as wide as if there were 0.1 more of them (DINO, iBOT, DINOv2).
"""
_OFFSET = 0.1


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


def decoder_positions(table_ND: Tensor, batch: Batch, grid: tuple[int, int]) -> Tensor:
    """Return a decoder's positions: its table's, or those of each view's box in a position field.

    Encoder and decoder have different widths, so they share coordinates: where the encoder's
    positions come from a box, the same sin-cos waves are evaluated at that box's patch centres.

    Args:
        table_ND: the sin-cos table of ``grid``.
        batch: may hold ``view/field_box`` (B, V, 4): x0, y0, x1, y1 with the whole field as [0, 1];
            x0 > x1 runs from right to left. The whole field gives the table.
        grid: (rows, columns) of the views.

    Returns:
        (N, D) for all samples alike, or float32 (B·V, N, D).
    """
    if field_box_key("view") not in batch:
        return table_ND
    boxes = batch[field_box_key("view")].flatten(0, 1).float()
    rows, cols = grid
    column = _centres(boxes[:, 0], boxes[:, 2], cols)[:, None, :].expand(-1, rows, -1)
    row = _centres(boxes[:, 1], boxes[:, 3], rows)[:, :, None].expand(-1, -1, cols)
    coordinates = torch.stack([column, row], dim=-1).flatten(1, 2)
    return sincos_at(table_ND.shape[-1], coordinates)


def _centres(low_B: Tensor, high_B: Tensor, count: int) -> Tensor:
    """Return (B, count) centres of the cells between two edges, in cells of the whole field."""
    share = (torch.arange(count, device=low_B.device) + 0.5) / count
    return (low_B[:, None] + (high_B - low_B)[:, None] * share) * count - 0.5


def resample_positions(
    table_ND: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    how: Resampling = "bicubic",
) -> Tensor:
    """Return a grid's position vectors at another grid of the same extent.

    Args:
        table_ND: (rows·cols, D) of the grid ``old``, row-major.
        old: (rows, columns).
        new: (rows, columns).
        how: as the code that trained the table reads it.
    """
    if old == new:
        return table_ND
    down, across = (_reading(size, count, how) for size, count in zip(old, new, strict=True))
    picture = table_ND.float().unflatten(0, old)
    down, across = (each.to(picture.device, non_blocking=True) for each in (down, across))
    with torch.autocast(picture.device.type, enabled=False):  # it would round positions to bf16
        rows = torch.einsum("nh,hwd->nwd", down, picture)
        return torch.einsum("mw,nwd->nmd", across, rows).flatten(0, 1)


def _reading(size: int, count: int, how: Resampling) -> Tensor:
    """Return the weights (count, size) with which ``count`` new cells read a row of old ones."""
    if how == "antialiased":  # each column of the picture is one old cell
        cells = torch.eye(size)[None, None]
        return F.interpolate(cells, (count, size), mode="bicubic", antialias=True)[0, 0]
    extent = count + (_OFFSET if how == "offset" else 0)
    return interpolation_weights(((torch.arange(count) + 0.5) / extent)[None], size, "bicubic")[0]


def grid_distances(rows: int, cols: int, *, squared: bool) -> Tensor:
    """Return float32 (N, N) distances between grid positions, in patches."""
    distance = grid_offsets(rows, cols).double().square().sum(-1)
    return (distance if squared else distance.sqrt()).float()


def grid_offsets(rows: int, cols: int) -> Tensor:
    """Return int64 (N, N, 2): Δrow and Δcolumn from each grid position (row) to each other."""
    place_N2 = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    return place_N2[None] - place_N2[:, None]


def smoothed_labels(distance_NN: Tensor, sigma: Tensor, *, official: bool = False) -> Tensor:
    """Return the soft target of every position: (N, N), row y for true position y.

    The weight of a position falls with its distance d as exp(−d/σ²) (DropPos, Eq. 5); rows sum
    to 1. ``official`` normalises columns instead, as the published code does by mistake.
    Widths below 0.05 patches are one-hot in float32, so σ = 0 needs no branch.
    """
    exponent = -distance_NN / sigma.clamp_min(0.05).square()
    return torch.softmax(exponent, dim=0 if official else 1)
