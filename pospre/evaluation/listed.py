"""Settings that are lists: ``0,6,12`` on the command line, ``[0, 6, 12]`` in a recipe."""

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeInt


def listed(value: object) -> object:
    """Return the items of a command line's ``0,0.5``, or of a recipe's list, as a tuple."""
    parts = value.strip("[]()").split(",") if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) else parts


Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], BeforeValidator(listed)]
Numbers = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), BeforeValidator(listed)]
"""Layers (0 is the embedding, the first block is 1), or patches (row by row from 0)."""
