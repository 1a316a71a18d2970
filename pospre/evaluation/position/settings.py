"""Settings of the evaluations that look at layers, grids and held-out images; their checks."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.registry import Plan
from pospre.nn.sizes import SIZES
from pospre.nn.swin.encoder import SWIN
from pospre.nn.timm_models import timm_size
from pospre.recipe.recipe import Recipe

LEAST_IMAGES = 8


def listed(value: object) -> object:
    """Return the parts of a command line's ``0,6,12``, or of a recipe's list, as a tuple."""
    parts = value.strip("[]()").split(",") if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) else parts


def _layers(value: object) -> object:
    return value if value == "all" else listed(value)


def _grids(value: object) -> object:
    """Return (rows, columns) of each of ``7,14x21``; one number is a square grid's."""
    parts = listed(value)
    if not isinstance(parts, Sequence):
        return value
    sides = [str(part).split("x") if isinstance(part, str | int) else part for part in parts]
    return tuple(tuple(map(_whole, side * 2 if len(side) == 1 else side)) for side in sides)


def _whole(side: object) -> object:
    return int(side) if isinstance(side, str) and side.strip().isdecimal() else side


Layers = Annotated[
    Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | Literal["all"],
    BeforeValidator(_layers),
]
Grid = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
Grids = Annotated[tuple[Grid, ...], BeforeValidator(_grids)]
Images = Annotated[int, Field(ge=LEAST_IMAGES)]


def check_images(owner: str, plan: Plan) -> None:
    """Raise a ``UserError`` of evaluation ``owner`` for too few images to learn and measure."""
    found = len(open_reader(plan.data))
    if found < LEAST_IMAGES:
        raise UserError(
            f"{owner}: {plan.data} has {found} images; most of them are learned from and the "
            f"others measured on, so give at least {LEAST_IMAGES}."
        )


def depth_of(recipe: Recipe) -> int:
    """Return the number of blocks of a recipe's encoder; of Swin 0: it is not for layers."""
    encoder = recipe.encoder
    if encoder.name == SWIN:
        return 0
    size = SIZES[encoder.name] if encoder.name in SIZES else timm_size(encoder.name)
    return size.depth if encoder.depth is None else encoder.depth
