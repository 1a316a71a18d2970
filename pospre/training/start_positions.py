"""The positions of an encoder that starts from other weights: they fit, or a message says why not.

Tables of another grid are resampled as the code that trained them does (``resample_positions``;
relative ones by timm's ``resize_rel_pos_bias_table``). Equal numbers of rows prove nothing: 14×14
patches are as many as 7×28. A fixed table is computed for the encoder's own grid instead.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.places import Places
from pospre.nn.positions.fading import Fading
from pospre.nn.positions.file_tables import (
    FileTable,
    Grid,
    read_table,
    relative_grid,
    resized_relative,
)
from pospre.nn.positions.foreign import as_text, is_interleaved, same_turn, turns, without_grid
from pospre.nn.positions.table import Table, resample_positions
from pospre.nn.weights.address import DROP, GRID, POSITIONS, as_grid
from pospre.nn.weights.encoder_from_tensors import no_grid
from pospre.nn.weights.names import TABLE, interleaved
from pospre.training.weight_files import Source

_UNSEEN = -1e4  # a bias of attention to what is not seen


def in_our_layout(encoder: PatchEncoder, source: Source) -> Source:
    """Return the tensors in the layout of our rotary positions; others stay as they are."""
    own, theirs = encoder.positions, source.known.positions
    if theirs is None and is_interleaved(own.as_given()) and "pos_embed" in source.tensors:
        raise UserError(
            f"{source.named} has a table of positions, but does not say whether its encoder "
            f"also rotates queries and keys. State it: '{source.address}{POSITIONS}"
            f"{as_text(own.as_given())}', or {source.address}{POSITIONS}learned"
        )
    if theirs is None or not turns(theirs):
        return source
    if not same_turn(own, theirs):
        raise UserError(
            f"{source.named} was trained with positions {as_text(theirs)}, and the "
            f"encoder has {as_text(own.as_given())}; use encoder.positions = {as_text(theirs)}"
            f"{_or_drop(source)}"
        )
    if source.is_run or not is_interleaved(theirs):
        return source
    tensors = interleaved(source.tensors, own.dims.num_heads, back=True)
    return replace(source, tensors=tensors)


def other_scheme(encoder: PatchEncoder, source: Source) -> list[str]:
    """Describe a change of schemes, which no tensor may show: distance biases have none."""
    theirs, own = source.known.positions, encoder.positions
    if theirs is None or turns(theirs):
        return []
    if without_grid(theirs) == without_grid(own.as_given()):
        return []
    return [f"{as_text(theirs)} → {as_text(own.as_given())}"]


def check_fixed(encoder: PatchEncoder, source: Source) -> None:
    """Raise ``UserError`` if a learned table would be loaded as the fixed one, and frozen.

    A run and an export record which it is; another file is judged by its values.
    """
    declared = source.known.positions or ""
    learned = bool(
        {"learned", "learned_sincos"} & {*([declared] if isinstance(declared, str) else declared)}
    )
    if source.known.positions is None and "pos_embed" in source.tensors:
        learned = not _read(encoder, source).is_fixed
    if learned:
        raise UserError(
            f"encoder.positions = sincos is a fixed table, but {source.name} has learned its own; "
            f"use encoder.positions=learned{_or_drop(source)}"
        )


def check_fading(positions: Fading) -> None:
    """Raise ``UserError`` if positions cannot fade into others."""
    old, new = positions.old, positions.new
    if old.name == new.name:
        raise UserError(
            f"encoder.keep = fade with positions = {new.name}, but the weights have {old.name}: "
            "there is nothing to fade. Leave encoder.keep out."
        )
    terms = new.layer_terms(Places(new.dims.grid))
    if any(each.bias is not None and bool((each.bias < _UNSEEN).any()) for each in terms):
        raise UserError(
            f"encoder.keep = fade with positions = {new.name}: its heads see no token in some "
            "directions, and no share of that is in between. Leave the file's positions out with "
            "',positions=drop'."
        )


def check_thrown_away(unused: list[str], encoder: PatchEncoder, source: Source) -> None:
    """Raise ``UserError`` if a table of positions would be left out without being asked for."""
    kinds = ("pos_embed", TABLE)
    tables = [key for key in unused if key.endswith(kinds) or key.startswith("positions.")]
    if tables:
        raise UserError(
            f"{source.named} was trained with positions ('{tables[0]}'), for which encoder."
            f"positions = {encoder.positions.name} has no place. Use the positions of the file, or "
            f"let them fade out: encoder.keep=fade{_or_drop(source)}"
        )


def _or_drop(source: Source) -> str:
    return f", or leave them out on purpose: '{source.address}{POSITIONS}{DROP}'"


class Fitted(NamedTuple):
    """A tensor of positions for the encoder, and in words what was changed and what assumed."""

    tensor: Tensor
    changed: str = ""
    assumed: str = ""


def fitted_table(own: Tensor, encoder: PatchEncoder, source: Source) -> Fitted:
    """Return the file's table of positions for the grid of ``own``, the encoder's."""
    there, table = _read(encoder, source), encoder.positions
    assert isinstance(table, Table)
    if there.rows.shape[-1] != own.shape[-1] or there.grid == table.grid:
        kept = [] if table.table_grid is None else kept_table(encoder)
        return Fitted(there.rows, "".join(kept), _assumed(there.grid, there.is_assumed))
    assumed = _checked(there.grid, table.grid, source, "pos_embed", is_assumed=there.is_assumed)
    change = _change("pos_embed", there.grid, table.grid)
    if not table.learns:
        return Fitted(own, f"{change}, computed anew", assumed)
    prefix, how = encoder.num_prefix_tokens, source.known.resampling or table.resampling
    patches = resample_positions(there.rows[0, prefix:], there.grid, table.grid, how)
    return Fitted(torch.cat([there.rows[0, :prefix], patches])[None], change, assumed)


def kept_table(encoder: PatchEncoder) -> list[str]:
    """Say that the encoder's table is of another grid than the images."""
    table = encoder.positions
    if not isinstance(table, Table) or table.grid == encoder.grid:
        return []
    return [f"{_change('pos_embed', table.grid, encoder.grid)} in each pass ({table.resampling})"]


def fitted_relative(
    key: str, theirs: Tensor, own: Tensor, encoder: PatchEncoder, source: Source
) -> Fitted:
    """Return the file's relative table ``key`` for the encoder's grid."""
    grid = relative_grid(len(theirs), encoder.has_class_token, source.known.grid)
    if grid is None:
        raise no_grid(source.named, source.address, key, theirs, source.known.grid)
    old, is_assumed = grid
    if theirs.shape[1] != own.shape[1] or old == encoder.grid:
        return Fitted(theirs, assumed=_assumed(old, is_assumed))
    assumed = _checked(old, encoder.grid, source, key, is_assumed=is_assumed)
    return Fitted(
        resized_relative(theirs, old, encoder.grid), _change(key, old, encoder.grid), assumed
    )


def _read(encoder: PatchEncoder, source: Source) -> FileTable:
    """Return the file's table; some have no rows for some prefix tokens, none for new registers."""
    table, class_token = source.tensors["pos_embed"], encoder.has_class_token
    own = encoder.num_prefix_tokens - class_token
    tokens = source.tensors.get("reg_token")
    registers = 0 if tokens is None else min(own, tokens.shape[1])
    bare = registers > 0 or table.shape[1] == encoder.num_patches
    table_rows = read_table(table, class_token, registers, known=source.known.grid, bare=bare)
    if table_rows is None:
        raise no_grid(source.named, source.address, "pos_embed", table, source.known.grid)
    there, rows = class_token + registers, table_rows.rows
    new = rows.new_zeros(1, own - registers, rows.shape[2])
    return table_rows._replace(rows=torch.cat([rows[:, :there], new, rows[:, there:]], dim=1))


def _checked(old: Grid, new: Grid, source: Source, key: str, *, is_assumed: bool) -> str:
    """Say what is assumed; ``UserError`` if the encoder's own grid is as likely."""
    if is_assumed and math.prod(old) == math.prod(new):
        first, second = (f"{source.address}{GRID}{rows}x{columns}" for rows, columns in (old, new))
        raise UserError(
            f"{source.named}: its tensor '{key}' may be of {as_grid(old)} patches or of "
            f"{as_grid(new)}, as the encoder's; nothing says which. Give '{first}' or '{second}'."
        )
    return _assumed(old, is_assumed)


def _assumed(grid: Grid, is_assumed: bool) -> str:
    return f"a grid of {as_grid(grid)}" if is_assumed else ""


def _change(key: str, old: Grid, new: Grid) -> str:
    return f"{key} {as_grid(old)} → {as_grid(new)}"
