"""The rotary positions of published encoders, as recipes write them."""

from typing import Any

import yaml

from pospre.nn.positions import Positions

DINOV3: Positions = "rotary"


def rope_vit(*, mixed: bool, table: bool) -> Positions:
    """Return those of rope-vit: axial or mixed, with a table (``ape``) or without."""
    raise NotImplementedError


def eva_02(*, table: bool) -> Positions:
    """Return those of EVA-02, which has a table, too; timm's ``rope_reg`` models have none."""
    raise NotImplementedError


def as_text(positions: Positions) -> str:
    """Write positions as a recipe on one line does."""
    if isinstance(positions, str):
        return positions
    text: str = yaml.safe_dump(dict(positions), default_flow_style=True, width=1000)
    return text.strip()


def options_of(positions: Positions) -> tuple[str, dict[str, Any]]:
    """Return the scheme's name and its options."""
    if isinstance(positions, str):
        return positions, {}
    ((name, options),) = positions.items()
    return name, dict(options or {})
