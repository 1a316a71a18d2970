"""Common settings of evaluations. Each kind's ``settings.py`` has the classes, one each.

These modules import neither torch nor the evaluations, so ``--help`` and errors in settings are
fast.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from pospre.docstrings import option_names

Pooling = Literal["mean", "cls", "prefix"]
Half = Literal["choose", "judge"]


class Settings(BaseModel):
    """Base class: an evaluation's settings class has its name in CamelCase (``Knn``)."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all settings, own ones before shared ones."""
        return option_names(cls)

    def values(self, *names: str) -> dict[str, Any]:
        """Return settings by name; default: all."""
        return {name: getattr(self, name) for name in names or self.names()}


class Sampling(Settings):
    """Choice and reading of the measured images."""

    num_samples: PositiveInt | None = None
    """Number of images, drawn by the seed; default: all."""
    batch_size: PositiveInt = 64
    """Images per forward pass; it does not change the result."""
    num_workers: PositiveInt | None = None
    """Decoding threads; default: the loader's choice."""
    seed: int = 0
    """Seed of the drawn images and of other random choices: masks, boxes, noise, weights."""


class Compared(Settings):
    """Comparison with the untrained model."""

    baseline: bool = True
    """Also measure the untrained model of the same recipe and seed."""


class Halved(Compared):
    """Measuring on one of two fixed halves of the images."""

    half: Half | None = None
    """Measure only one of two fixed halves of the images, to choose on one and judge on the other.
    """


def as_tuple(value: object) -> object:
    """Return the items of ``0,0.5`` on the command line, or of a recipe's list, as a tuple."""
    if isinstance(value, str):
        text = value.strip("[]() ")
        return tuple(text.split(",")) if text else ()
    return tuple(value) if isinstance(value, list) else value


Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], BeforeValidator(as_tuple)]
Numbers = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), BeforeValidator(as_tuple)]
"""Layers (0 is the embedding, 1 the first block), or patches (row-major from 0)."""
OpenRatio = Annotated[float, Field(gt=0, lt=1)]
AboveOne = Annotated[float, Field(gt=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
