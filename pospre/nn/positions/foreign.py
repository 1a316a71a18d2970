"""Positions of other codes: rotary ones in the form of recipes, and tables in our layout."""

from collections.abc import Mapping
from typing import Any

import torch
import yaml
from torch import Tensor

from pospre.nn.encoder_options import GivenPositions, Positions
from pospre.nn.places import Places
from pospre.nn.positions import build_positions, named_scheme, scheme_class
from pospre.nn.positions.rotary import Rotary
from pospre.nn.positions.scheme import Resampling, Scheme

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
    name, options = named_scheme(positions)
    if name == _BOTH:
        return rotation_of(options.get("rotation", "rotary"))
    return (name, {**options}) if name in ("rotary", "rotary_mixed") else None


def turns(positions: Positions) -> bool:
    """Return whether these positions rotate queries and keys."""
    return rotation_of(positions) is not None


def has_table(positions: Positions) -> bool:
    """Return whether these rotary positions include a table."""
    return positions == _BOTH or (not isinstance(positions, str) and _BOTH in positions)


def table_grid(positions: GivenPositions) -> tuple[int, int] | None:
    """Return the grid that a table keeps whatever the images' is; None: it has theirs."""
    _, options = named_scheme(positions)
    sides = options.get("table_grid")
    return None if sides is None else (sides[0], sides[1])


def keeping_grid(
    positions: Positions, grid: tuple[int, int], resampling: Resampling | None
) -> Positions:
    """Return positions whose learned table keeps this grid; others as they are."""
    name, options = named_scheme(positions)
    if not scheme_class(name).learns:
        return positions
    kept: dict[str, Any] = {"table_grid": [*grid]}
    if resampling not in (None, "bicubic"):
        kept["resampling"] = resampling
    return {name: {**options, **kept}}


def without_grid(positions: Positions) -> Positions:
    """Return positions without what ``keeping_grid`` adds."""
    name, options = named_scheme(positions)
    own = {key: each for key, each in options.items() if key not in ("table_grid", "resampling")}
    return {name: own} if own else name


def adds_table(positions: Positions) -> bool:
    """Return whether a table is added to tokens, learned or fixed, with a rotation or without."""
    name, _ = named_scheme(positions)
    return bool(scheme_class(name).inputs)


def is_interleaved(positions: Positions) -> bool:
    """Return whether published weights rotate channels 2i and 2i + 1, not i and i + D/2."""
    rotation = rotation_of(positions)
    return rotation is not None and (
        rotation[0] == "rotary_mixed" or rotation[1].get("coordinates", "centred") != "centred"
    )


def is_rounded(positions: Positions | None) -> bool:
    """Return whether rotary periods are in bfloat16."""
    rotation = None if positions is None else rotation_of(positions)
    return rotation is not None and bool(rotation[1].get("bf16_periods"))


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
        turning.append(build_positions({name: options}, own.dims))
    if [*turning[0].parameters()]:  # learned: they come with the weights
        return True
    for scheme in turning:
        scheme.reset_parameters()
    first, second = (scheme.angles(Places((2, 3)), 0) for scheme in turning)
    return first is not None and second is not None and torch.allclose(first, second, rtol=1e-4)


def constant_frequencies(scheme: Scheme) -> Tensor | None:
    """Return a scheme's frequencies in the form of mixed rotary positions, if none are learned.

    (2, blocks, heads, D/2) for rotary positions along more directions than the axes, else None.
    """
    rotation = getattr(scheme, "rotation", scheme)
    if not isinstance(rotation, Rotary) or rotation.directions == 2:
        return None
    return rotation.frequencies()


def as_text(positions: Positions) -> str:
    """Write positions on one line, as in a recipe."""
    if isinstance(positions, str):
        return positions
    text: str = yaml.safe_dump(positions, default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


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
