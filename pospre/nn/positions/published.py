"""The rotary positions of published encoders, as recipes write them."""

from typing import Any

import torch
import yaml

from pospre.nn.places import Places
from pospre.nn.positions import Positions, build_positions
from pospre.nn.positions.scheme import Scheme

DINOV3: Positions = "rotary"


def cells(base: float, reference: tuple[int, int] | None, *, columns_first: bool) -> Positions:
    """Return those that count cells from the top left one; of a ``reference`` grid or their own."""
    options: dict[str, Any] = {"base": float(base), "columns_first": columns_first}
    return {"rotary": {**options, "coordinates": "reference" if reference else "cells"}}


def rope_vit(*, mixed: bool, table: bool) -> Positions:
    """Return those of rope-vit: axial or mixed, with a table (``ape``) or without."""
    return with_table(table, "rotary_mixed" if mixed else cells(100, None, columns_first=True))


def eva_02(*, table: bool) -> Positions:
    """Return those of EVA-02, which has a table, too; timm's ``rope_reg`` models have none."""
    return with_table(table, cells(10000, (16, 16), columns_first=False))


def with_table(table: bool, rotation: Positions) -> Positions:
    """Return a rotation, with a table or without."""
    return {"learned_rotary": {"rotation": rotation}} if table else rotation


def rotation_of(positions: Positions) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options of the scheme that turns queries and keys; None: none."""
    if isinstance(positions, str):
        name, options = positions, {}
    else:
        ((name, options),) = positions.items()
    if name == "learned_rotary":
        return rotation_of(options.get("rotation", "rotary"))
    return (name, {**options}) if name.startswith("rotary") else None


def has_table(positions: Positions) -> bool:
    """Return whether a rotary encoder with these has a table, too."""
    return not isinstance(positions, str) and "learned_rotary" in positions


def turns(positions: Positions) -> bool:
    """Return whether an encoder with these turns queries and keys."""
    return rotation_of(positions) is not None


def is_interleaved(positions: Positions) -> bool:
    """Return whether published weights turn channels 2i and 2i + 1 together, not i and i + D/2."""
    found = rotation_of(positions)
    return found is not None and (found[0] != "rotary" or "coordinates" in found[1])


def same_turn(own: Scheme, positions: Positions) -> bool:
    """Return whether a scheme turns queries and keys as ``positions`` do, in evaluation."""
    own_turn, their_turn = rotation_of(own.as_given()), rotation_of(positions)
    if own_turn is None or their_turn is None:
        return own_turn == their_turn
    if own_turn[0] != their_turn[0]:
        return False
    other = build_positions({their_turn[0]: their_turn[1]}, own.space)
    if [*other.parameters()]:  # learned: they come with the weights
        return True
    other.reset_parameters()
    other.to(next(own.buffers()).device)
    pair = [scheme.angles(Places((2, 3)), 0) for scheme in (own, other)]
    return all(each is not None for each in pair) and torch.allclose(*pair, rtol=0.01, atol=0.01)


def as_text(positions: Positions) -> str:
    """Write positions as a recipe on one line does."""
    if isinstance(positions, str):
        return positions
    text: str = yaml.safe_dump(positions, default_flow_style=True, width=1000)
    return text.strip()
