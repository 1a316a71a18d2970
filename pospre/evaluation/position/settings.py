"""Settings of the evaluations that learn from some images and measure on others."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveInt

from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.registry import Plan
from pospre.evaluation.settings import as_tuple

LEAST_IMAGES = 8


def _grids(value: object) -> object:
    """Return (rows, columns) of each of ``7,14x21``; one number is a square grid's."""
    parts = as_tuple(value)
    if not isinstance(parts, Sequence):
        return value
    sides = [str(part).split("x") if isinstance(part, str | int) else part for part in parts]
    return tuple(tuple(map(_whole, side * 2 if len(side) == 1 else side)) for side in sides)


def _whole(side: object) -> object:
    return int(side) if isinstance(side, str) and side.strip().isdecimal() else side


Grid = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
Grids = Annotated[tuple[Grid, ...], BeforeValidator(_grids)]
Images = Annotated[int, Field(ge=LEAST_IMAGES)]


def check_images(plan: Plan) -> None:
    """Raise a ``UserError`` for too few images to learn and measure."""
    found = len(open_reader(plan.data))
    if found < LEAST_IMAGES:
        raise UserError(
            f"{plan.data} has {found} images; most of them are learned from and the "
            f"others measured on, so give at least {LEAST_IMAGES}."
        )
