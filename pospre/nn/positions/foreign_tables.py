"""Conversion of position tables between our layout and other codes' layouts."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pospre.nn.patch_encoder import PatchEncoder
from pospre.nn.positions.scheme import Resampling
from pospre.nn.positions.table import Table


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
        count = max(table.shape[1] - there, 0)
        if count and math.isqrt(count) ** 2 == count:
            head, patches = table[:, :there], table[:, there:]
            zeros = table.new_zeros(1, prefix - there, table.shape[2])
            return torch.cat([head, zeros, patches], dim=1)
    return table


def as_their_table(
    state: dict[str, Tensor], theirs: Mapping[str, Tensor], prefix: int
) -> dict[str, Tensor]:
    """Return tensors, by timm's names, for a model whose table lacks rows of ``prefix`` tokens."""
    table, wanted = state.get("pos_embed"), theirs.get("pos_embed")
    if table is None or wanted is None or wanted.shape[1] >= table.shape[1]:
        return state
    return without_rows(state, 0, prefix)


def without_rows(state: dict[str, Tensor], kept: int, prefix: int) -> dict[str, Tensor]:
    """Add the table's rows of ``prefix`` tokens to these tokens, and drop all but ``kept`` rows."""
    own, table = int("cls_token" in state), state["pos_embed"]
    parts = {"cls_token": table[:, kept:own], "reg_token": table[:, max(kept, own) : prefix]}
    added = {key: state[key] + rows for key, rows in parts.items() if rows.shape[1]}
    return {**state, **added, "pos_embed": torch.cat([table[:, :kept], table[:, prefix:]], dim=1)}


def hold_table(
    encoder: PatchEncoder,
    tensors: dict[str, Tensor],
    likely: Sequence[tuple[int, int]],
    resampling: Resampling | None,
    *,
    bare: bool,
) -> list[str]:
    """Give ``encoder`` room for a file's table; return a description of what gets resampled.

    A table for another grid than the images' is kept, and resampled for each image size.
    Evaluations use several sizes, and resampling twice would lose precision. Its grid is the first
    of ``likely`` with this number of cells, or else a square. The table in ``tensors`` gets a row
    for each prefix token; for ``bare`` see ``with_prefix_rows``.
    """
    table, positions = tensors.get("pos_embed"), encoder.positions
    if table is None or not isinstance(positions, Table):
        return []
    positions.resampling = resampling or positions.resampling
    class_token, prefix = encoder.has_class_token, encoder.num_prefix_tokens
    registers, counts = prefix - class_token, {math.prod(grid): grid for grid in likely[::-1]}
    bare = bare or registers > 0 or table.shape[1] in counts
    tensors["pos_embed"] = table = with_prefix_rows(table, class_token, registers, bare=bare)
    side = math.isqrt(max(table.shape[1] - prefix, 0))
    grid = {side * side: (side, side), **counts}.get(table.shape[1] - prefix, encoder.grid)
    if grid == encoder.grid:
        return []
    positions.make_room(grid)
    sizes = " → ".join(f"{rows}×{columns}" for rows, columns in (grid, encoder.grid))
    return [f"positions of {sizes} patches ({positions.resampling})"]
