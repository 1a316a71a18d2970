"""Position tables of weights files: which grid they have, and how they get another one."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from timm.layers import resize_rel_pos_bias_table
from torch import Tensor

from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.scheme import Resampling
from pospre.nn.positions.sincos import is_sincos
from pospre.nn.positions.table import Table

Grid = tuple[int, int]
_EXTRA = 3  # rows of a relative table for prefix tokens


class FileTable(NamedTuple):
    """A table of a file, completed.

    Attributes:
        rows: (1, P+N, D), with a row for every prefix token.
        grid: (rows, columns) of its patches.
        is_assumed: nothing shows the grid, and it is taken for a square.
        is_fixed: the patches have the sin-cos vectors of this grid.
    """

    rows: Tensor
    grid: Grid
    is_assumed: bool
    is_fixed: bool


def read_table(
    table: Tensor, class_token: bool, registers: int, *, known: Grid | None, bare: bool
) -> FileTable | None:
    """Return a file's table and its grid; None if no grid fits.

    The grid is ``known``; or a fixed table's values show it; or it is a square. For ``bare`` see
    ``with_prefix_rows``.
    """
    prefix = class_token + registers
    if known is None:
        rows = with_prefix_rows(table, class_token, registers, bare=bare)
        grid = _fixed_grid(rows[0, prefix:])
        square = square_side(rows.shape[1] - prefix)
        if grid is not None:
            return FileTable(rows, grid, False, True)
        return None if square is None else FileTable(rows, (square, square), True, False)
    there = table.shape[1] - math.prod(known)
    if there not in (0, int(class_token), prefix):
        return None
    rows = _with_rows(table, there, prefix)
    return FileTable(rows, known, False, _is_fixed(rows[0, prefix:], known))


def _fixed_grid(patches_ND: Tensor) -> Grid | None:
    """Return the grid whose sin-cos vectors these are; None: of no grid."""
    count = len(patches_ND)
    grids = ((side, count // side) for side in range(1, count + 1) if count % side == 0)
    return next((grid for grid in grids if _is_fixed(patches_ND, grid)), None)


def _is_fixed(patches_ND: Tensor, grid: Grid) -> bool:
    return patches_ND.shape[1] % 4 == 0 and is_sincos(patches_ND, *grid)


def square_side(count: int) -> int | None:
    """Return the side of a square of ``count`` cells, None if there is none."""
    side = math.isqrt(max(count, 0))
    return side if side and side * side == count else None


def with_prefix_rows(table: Tensor, class_token: bool, registers: int, *, bare: bool) -> Tensor:
    """Return a position table (1, P+N, D) with a row for every prefix token.

    Some timm tables have no rows for registers, or none for the class token; these become zeros. A
    table that does not fit a square grid in any of these ways is returned unchanged. Only a
    ``bare`` table may have rows for patches alone. Without registers the number of rows is
    ambiguous: 3×3 patches need as many rows as 2×4 patches and a class token.
    """
    prefix = class_token + registers
    if registers and not bool(table[0, int(class_token) : prefix].any()):
        return table  # registers have no positions
    for there in dict.fromkeys((int(class_token), *((0,) if bare else ()), prefix)):
        if square_side(table.shape[1] - there):
            return _with_rows(table, there, prefix)
    return table


def _with_rows(table: Tensor, there: int, prefix: int) -> Tensor:
    """Return a table with rows for ``prefix`` tokens; it has those of the first ``there``."""
    zeros = table.new_zeros(1, prefix - there, table.shape[2])
    return torch.cat([table[:, :there], zeros, table[:, there:]], dim=1)


def relative_grid(count: int, prefix: bool, known: Grid | None) -> tuple[Grid, bool] | None:
    """Return the grid of a relative table of ``count`` rows and whether it is assumed, as above."""
    offsets = count - _EXTRA * prefix
    if known is not None:
        return (known, False) if _offsets(known) == offsets else None
    side = square_side(offsets)
    return None if side is None or side % 2 == 0 else (((side + 1) // 2,) * 2, True)


def _offsets(grid: Grid) -> int:
    return (2 * grid[0] - 1) * (2 * grid[1] - 1)


def resized_relative(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Return a relative table of the grid ``old`` for the grid ``new``, as timm resizes it."""
    biases, extra = table[: _offsets(old)], table[_offsets(old) :]
    (tall, wide), (high, broad) = ([2 * side - 1 for side in grid] for grid in (old, new))
    maps = biases.T.reshape(-1, tall, wide)
    # timm cannot interpolate along a side of one cell
    maps = maps.repeat(1, 3 if tall == 1 else 1, 3 if wide == 1 else 1)
    maps = resize_rel_pos_bias_table(maps, new, (len(maps), high, broad))
    return torch.cat([maps.reshape(len(table.T), -1).T, extra])


def without_empty(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an encoder's tensors, by timm's names, without those that stand for nothing.

    timm has a table of zeros for an encoder without positions, transformers no registers as an
    empty tensor.
    """
    table = tensors.get("pos_embed")
    empty = {"pos_embed"} if table is not None and not bool(table.any()) else set()
    return {key: each for key, each in tensors.items() if key not in empty and each.numel()}


def hold_table(
    encoder: PatchEncoder,
    tensors: dict[str, Tensor],
    known: Grid | None,
    resampling: Resampling | None,
    *,
    usual: Grid | None = None,
    bare: bool = False,
) -> FileTable | None:
    """Give ``encoder`` room for a file's table and return it; None: no table, or of no grid.

    A table for another grid than the images' is kept, and resampled for each image size.
    Evaluations use several sizes, and resampling twice would lose precision. The table in
    ``tensors`` gets a row for each prefix token. Its grid is ``known``, or the ``usual`` one of its
    model if that has as many cells; for ``bare`` see ``with_prefix_rows``.
    """
    table, positions = tensors.get("pos_embed"), encoder.positions
    if table is None or not isinstance(positions, Table):
        return None
    class_token, prefix = encoder.has_class_token, encoder.num_prefix_tokens
    registers = prefix - class_token
    if known is None and usual is not None:
        counts = [math.prod(usual) + there for there in (0, int(class_token), prefix)]
        known = usual if table.shape[1] in counts else None
    table_rows = read_table(table, class_token, registers, known=known, bare=bare or registers > 0)
    if table_rows is not None:
        positions.resampling = resampling or positions.resampling
        tensors["pos_embed"] = table_rows.rows
        if table_rows.grid != encoder.grid:
            positions.make_room(table_rows.grid)
    return table_rows
