"""Settings that many evaluations share: which images are measured, and lists of numbers."""

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class Sampling:
    """Which images are measured, and how they are read.

    Args:
        num_samples: measure on so many images, drawn by the seed; all without it.
        batch_size: images per forward pass; it does not change the result.
        num_workers: decoding threads; the loader chooses without it.
        seed: of the drawn images, and of what else is random: masks, boxes, noise, weights.
    """

    num_samples: PositiveInt | None = None
    batch_size: PositiveInt = 64
    num_workers: PositiveInt | None = None
    seed: int = 0


def as_tuple(value: object) -> object:
    """Return the items of a command line's ``0,0.5``, or of a recipe's list, as a tuple."""
    parts = value.strip("[]()").split(",") if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) else parts


Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], BeforeValidator(as_tuple)]
Numbers = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), BeforeValidator(as_tuple)]
"""Layers (0 is the embedding, the first block is 1), or patches (row by row from 0)."""
