"""What the settings of evaluations share. The ``settings.py`` of each kind has its classes.

These modules import neither torch nor the evaluations: ``--help`` and a mistyped setting do not
wait for them.
"""

from dataclasses import dataclass, fields
from inspect import get_annotations
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

Pooling = Literal["mean", "cls"]


@dataclass(frozen=True)
class Settings:
    """Of one evaluation: a subclass in its kind's ``settings.py``, called as it is (``Knn``)."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every setting, its own before those shared; or ``MISSING``."""
        values = {each.name: each.default for each in fields(cls)}
        own = [name for base in cls.__mro__ for name in get_annotations(base)]
        return {name: values[name] for name in dict.fromkeys(own)}


@dataclass(frozen=True)
class Sampling(Settings):
    """Which images are measured, and how they are read.

    Attributes:
        num_samples: measure on so many images, drawn by the seed; all without it.
        batch_size: images per forward pass; it does not change the result.
        num_workers: decoding threads; the loader chooses without it.
        seed: of the drawn images, and of what else is random: masks, boxes, noise, weights.
    """

    num_samples: PositiveInt | None = None
    batch_size: PositiveInt = 64
    num_workers: PositiveInt | None = None
    seed: int = 0


@dataclass(frozen=True)
class Compared(Settings):
    """Whether the untrained model stands beside the trained one.

    Attributes:
        baseline: measure the untrained model of the same recipe and seed as well.
    """

    baseline: bool = True


def as_tuple(value: object) -> object:
    """Return the items of a command line's ``0,0.5``, or of a recipe's list, as a tuple."""
    parts = value.strip("[]()").split(",") if isinstance(value, str) else value
    return tuple(parts) if isinstance(parts, list) else parts


Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], BeforeValidator(as_tuple)]
Numbers = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), BeforeValidator(as_tuple)]
"""Layers (0 is the embedding, the first block is 1), or patches (row by row from 0)."""
AboveOne = Annotated[float, Field(gt=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
