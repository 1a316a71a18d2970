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
    """Settings of ``patch_position``."""

    mask_ratios: Ratios = (0.0, 0.25, 0.5, 0.75)
    """Shares η of patches outside the context, such as 0,0.75."""


class PositionGrid(Sampling, Compared):
    """Settings of ``position_grid``."""


class PositionPictures(Settings):
    """Settings of ``position_pictures``."""

    num_pictures: PositiveInt = 8
    """Number of images, drawn by the seed."""
    mask_ratio: Ratio = 0.0
    """The method's: share of hidden patches (DropPos), or of those outside the context (MP3)."""
    position_mask_ratio: PositiveShare | None = None
    """Share of visible patches whose position is predicted, if the method has it; default: 0.75."""
    mixed: bool = False
    """Shuffle the patches of pairs of images together, for methods without given positions."""
    seed: int = 0
    """Seed of the drawn images, the masks and the order of shuffled patches."""


class Tokens(Sampling):
    """Patch tokens for position probes, and how these are fitted."""

    num_samples: Images = 400
    """Number of images, drawn by the seed; a quarter of them is measured."""
    num_tokens: PositiveInt = 64
    """Maximal number of patches per image, drawn by the seed."""
    weight_decay: PositiveFloat = 1e-3
    """Weight decay of both probes."""
    iterations: PositiveInt = 30
    """Maximal number of the classifier's L-BFGS iterations."""


class PositionProbe(Tokens, Compared):
    """Settings of ``position_probe``."""

    layers: Numbers | Literal["all"] = "all"
    """``all``, or a list such as 0,6,12: 0 is the embedding, the others are blocks."""
    grids: Grids = ()
    """Further grids of patches, such as 7,20x28: images are resized to them."""
    versus: str | None = None
    """Another --model of the same encoder to compare with, for example after fine-tuning."""


class PositionRemoval(Tokens):
    """Settings of ``position_removal``."""

    by: Literal["regression", "covariance"] = "regression"
    """The plane to project out: of the regression's weights or of the covariance."""
    planes: Planes | None = None
    """Number of planes, one after the other; default: 9. The covariance has one."""
    evaluations: Listed[str] = ()
    """Other evaluations to run before and after, such as knn,logistic."""
    bank: str | None = None
    """Their setting of that name."""


class ShiftedPositions(Sampling, Compared):
    """Settings of ``shifted_positions``."""

    shifts: Listed[PositiveInt] = (1, 2, 4)
    """Numbers of patches to shift by, down and right."""
    zooms: Listed[AboveOne] = (1.25, 2.0)
    """Factors to stretch the middle of the positions by."""
    scales: Listed[PositiveFloat] = (0.75, 1.5)
    """Factors of the image's sides; the grid is rounded."""
    features: Pooling = "mean"
    """Mean of the patch tokens, or the class token."""
    k: PositiveInt = 20
    """Number of neighbours that vote."""
    num_samples: TwoOrMore = 500
    """Number of images, drawn by the seed."""
