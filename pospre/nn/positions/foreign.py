"""Positions of other codes: rotary ones in the form of recipes, and tables in our layout."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.encoder_options import Positions
from pospre.nn.places import Places
from pospre.nn.positions import build_positions
from pospre.nn.positions.scheme import Resampling, Scheme
from pospre.nn.positions.table import Table

DINOV3: Positions = "rotary"
DINOV3_ROUNDED: Positions = {"rotary": {"bf16_periods": True}}
_BOTH = "learned_rotary"


def dinov3(periods: Tensor | None) -> Positions | None:
    """Return DINOv3's positions if these are its periods; otherwise None."""
    if periods is None:
        return DINOV3
    exact = 100 ** (torch.arange(len(periods), dtype=torch.float64) / len(periods))
    if torch.equal(periods.float(), exact.bfloat16().float()):
        return DINOV3_ROUNDED
    return DINOV3 if torch.allclose(periods.double(), exact, rtol=1e-5) else None


def cells(base: float, *, columns_first: bool, reference: bool = False) -> Positions:
    """Return positions in cells, of the encoder's grid or of the reference grid."""
    options: dict[str, Any] = {"coordinates": "reference" if reference else "cells"}
    options |= {} if base == 100 else {"base": float(base)}
    options |= {"columns_first": True} if columns_first else {}
    return {"rotary": options}


def rope_vit(*, mixed: bool = False, table: bool = False) -> Positions:
    """Return RoPE-ViT's positions: axial or mixed, with a table (``ape``) or without."""
    return with_table(table, "rotary_mixed" if mixed else cells(100, columns_first=True))


def eva_02(*, table: bool) -> Positions:
    """Return EVA-02's positions, with a table; timm's ``rope_reg`` models have no table."""
    return with_table(table, cells(10000, columns_first=False, reference=True))


def with_table(table: bool, rotation: Positions) -> Positions:
    """Return a rotation, with a table if ``table``."""
    return {_BOTH: {"rotation": rotation}} if table else rotation


def rotation_of(positions: Positions) -> tuple[str, dict[str, Any]] | None:
    """Return the name and options of the rotation; None: no rotation."""
    given = {positions: {}} if isinstance(positions, str) else positions
    ((name, options),) = given.items()
    if name == _BOTH:
        return rotation_of(options.get("rotation", "rotary"))
    return (name, {**options}) if name.startswith("rotary") else None


def turns(positions: Positions) -> bool:
    """Return whether these positions rotate queries and keys."""
    return rotation_of(positions) is not None


def has_table(positions: Positions) -> bool:
    """Return whether these rotary positions include a table."""
    return positions == _BOTH or (not isinstance(positions, str) and _BOTH in positions)


def is_interleaved(positions: Positions) -> bool:
    """Return whether published weights rotate channels 2i and 2i + 1, not i and i + D/2."""
    found = rotation_of(positions)
    return found is not None and (
        found[0] == "rotary_mixed" or found[1].get("coordinates", "centred") != "centred"
    )


def is_rounded(positions: Positions | None) -> bool:
    """Return whether rotary periods are in bfloat16."""
    found = None if positions is None else rotation_of(positions)
    return found is not None and bool(found[1].get("bf16_periods"))


def same_turn(own: Scheme, positions: Positions) -> bool:
    """Return whether a scheme rotates queries and keys as ``positions`` do, in evaluation.

    Rounding of periods is ignored: timm loads DINOv3's weights with exact periods.
    """
    pair = rotation_of(own.as_given()), rotation_of(positions)
    if pair[0] is None or pair[1] is None or pair[0][0] != pair[1][0]:
        return False
    turning = []
    for name, options in (pair[0], pair[1]):
        options.pop("bf16_periods", None)
        turning.append(build_positions({name: options}, own.space))
    if [*turning[0].parameters()]:  # learned: they come with the weights
        return True
    for scheme in turning:
        scheme.reset_parameters()
    first, second = (scheme.angles(Places((2, 3)), 0) for scheme in turning)
    return first is not None and second is not None and torch.allclose(first, second, rtol=1e-4)


def as_text(positions: Positions) -> str:
    """Write positions on one line, as in a recipe."""
    if isinstance(positions, str):
        return positions
    text: str = yaml.safe_dump(positions, default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


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


def without_empty_table(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an encoder's tensors without a table of zeros, as one without positions has for timm.

    Args:
        tensors: by timm's names.
    """
    return {key: each for key, each in tensors.items() if key != "pos_embed" or bool(each.any())}


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
