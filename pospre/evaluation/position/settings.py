"""Settings of the position evaluations."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from pospre.evaluation.common_settings import (
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
    """Return (rows, columns) of each of ``7,14x21``; a single number is a square grid."""
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
Planes = Annotated[int, Field(ge=1, le=15)]


class PatchPosition(Sampling, Compared):
    """Settings of ``patch_position``.

    Attributes:
        mask_ratios: shares η of patches outside the context, such as 0,0.75.
    """

    mask_ratios: Ratios = (0.0, 0.25, 0.5, 0.75)


class PositionGrid(Sampling, Compared):
    """Settings of ``position_grid``."""


class PositionPictures(Settings):
    """Settings of ``position_pictures``.

    Attributes:
        num_pictures: number of images, drawn by the seed.
        mask_ratio: the method's: for DropPos the share of hidden patches, for MP3 the share outside
            the context.
        position_mask_ratio: share of visible patches whose position is predicted, for methods with
            this option; default: 0.75.
        mixed: shuffle the patches of pairs of images together, for methods without given positions.
        seed: seed of the drawn images, the masks and the order of shuffled patches.
    """

    num_pictures: PositiveInt = 8
    mask_ratio: Ratio = 0.0
    position_mask_ratio: PositiveShare | None = None
    mixed: bool = False
    seed: int = 0


class Tokens(Sampling):
    """Patch tokens for position probes, and how these are fitted.

    Attributes:
        num_samples: number of images, drawn by the seed; a quarter of them is measured.
        num_tokens: maximal number of patches per image, drawn by the seed.
        weight_decay: weight decay of both probes.
        iterations: maximal number of the classifier's L-BFGS iterations.
    """

    num_samples: Images = 400
    num_tokens: PositiveInt = 64
    weight_decay: PositiveFloat = 1e-3
    iterations: PositiveInt = 30


class PositionProbe(Tokens, Compared):
    """Settings of ``position_probe``.

    Attributes:
        layers: all, or a list such as 0,6,12: 0 is the embedding, the others are blocks.
        grids: further grids of patches, such as 7,20x28: images are resized to them.
        versus: another --model of the same encoder to compare with, for example after fine-tuning.
    """

    layers: Numbers | Literal["all"] = "all"
    grids: Grids = ()
    versus: str | None = None


class PositionRemoval(Tokens):
    """Settings of ``position_removal``.

    Attributes:
        by: the plane to project out: of the regression's weights or of the covariance.
        planes: number of planes, one after the other; default: 9. The covariance has one.
        evaluations: other evaluations to run before and after, such as knn,logistic.
        bank: their setting of that name.
    """

    by: Literal["regression", "covariance"] = "regression"
    planes: Planes | None = None
    evaluations: Listed[str] = ()
    bank: str | None = None


class ShiftedPositions(Sampling, Compared):
    """Settings of ``shifted_positions``.

    Attributes:
        shifts: numbers of patches to shift by, down and right.
        zooms: factors to stretch the middle of the positions by.
        scales: factors of the image's sides; the grid is rounded.
        features: mean of the patch tokens, or the cls token.
        k: number of neighbours that vote.
        num_samples: number of images, drawn by the seed.
    """

    shifts: Listed[PositiveInt] = (1, 2, 4)
    zooms: Listed[AboveOne] = (1.25, 2.0)
    scales: Listed[PositiveFloat] = (0.75, 1.5)
    features: Pooling = "mean"
    k: PositiveInt = 20
    num_samples: TwoOrMore = 500
