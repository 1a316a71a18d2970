"""Settings of the evaluations of positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from pospre.evaluation.settings import (
    AboveOne,
    Compared,
    Listed,
    Numbers,
    Pooling,
    Sampling,
    Settings,
    TwoOrMore,
    as_tuple,
)
from pospre.ranges import PositiveShare, Ratio

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
Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1), BeforeValidator(as_tuple)]
Direction = Literal["regression", "covariance"]
Planes = Annotated[int, Field(ge=1, le=15)]


@dataclass(frozen=True, kw_only=True)
class PatchPosition(Sampling, Compared):
    """Settings of ``patch_position``.

    Attributes:
        mask_ratios: the shares η of patches outside the context, such as 0,0.75.
    """

    mask_ratios: Ratios = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class PositionGrid(Sampling, Compared):
    """Settings of ``position_grid``."""


@dataclass(frozen=True, kw_only=True)
class PositionPictures(Settings):
    """Settings of ``position_pictures``.

    Attributes:
        num_pictures: how many images, drawn by the seed.
        mask_ratio: the method's: of DropPos the share of patches that the model does not see, of
            MP3 of those outside of the context.
        position_mask_ratio: share of the visible patches whose position it must predict, of methods
            that have this option; 0.75 without it.
        mixed: shuffle the patches of every two images together, where none knows its place.
        seed: of the drawn images, the masks and the order of shuffled patches.
    """

    num_pictures: PositiveInt = 8
    mask_ratio: Ratio = 0.0
    position_mask_ratio: PositiveShare | None = None
    mixed: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Tokens(Settings):
    """The patch tokens that position is read from, and how.

    Attributes:
        num_samples: images, drawn by the seed; a quarter of them is measured on.
        num_tokens: so many patches of each image at most, drawn by the seed.
        weight_decay: of both probes.
        iterations: of the classifier's L-BFGS at most.
        num_workers: decoding threads; the loader chooses without it.
        seed: draws images, patches, masks and the order of shuffled patches.
    """

    num_samples: Images = 400
    num_tokens: PositiveInt = 64
    weight_decay: PositiveFloat = 1e-3
    iterations: PositiveInt = 30
    num_workers: PositiveInt | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PositionProbe(Tokens, Compared):
    """Settings of ``position_probe``.

    Attributes:
        layers: all, or such as 0,6,12: 0 is the embedding, the others are blocks.
        grids: further grids of patches, such as 7,20x28: the image is taken at that size.
        versus: another --model of the same encoder, to stand beside: after fine-tuning, say.
    """

    layers: Numbers | Literal["all"] = "all"
    grids: Grids = ()
    versus: str | None = None


@dataclass(frozen=True, kw_only=True)
class PositionRemoval(Tokens):
    """Settings of ``position_removal``.

    Attributes:
        by: which plane is projected out, of the regression's weights or of the covariance.
        planes: so many, one after the other; 9 without it. Of the covariance there is one.
        evaluations: names of others, such as knn,logistic, to do before and after.
        bank: their setting of that name.
    """

    by: Direction = "regression"
    planes: Planes | None = None
    evaluations: Listed[str] = ()
    bank: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShiftedPositions(Compared):
    """Settings of ``shifted_positions``.

    Attributes:
        shifts: by so many patches, down and right.
        zooms: so much the middle of the positions is stretched.
        scales: of the image's sides; the grid is rounded.
        features: mean of the patch tokens, or the cls token.
        k: neighbours that vote.
        num_samples: images, drawn by the seed.
        num_workers: decoding threads; the loader chooses without it.
        seed: draws the images.
    """

    shifts: Listed[PositiveInt] = (1, 2, 4)
    zooms: Listed[AboveOne] = (1.25, 2.0)
    scales: Listed[PositiveFloat] = (0.75, 1.5)
    features: Pooling = "mean"
    k: PositiveInt = 20
    num_samples: TwoOrMore = 500
    num_workers: PositiveInt | None = None
    seed: int = 0
