"""Settings of the position evaluations."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

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
from pospre.recipe.yaml_text import parse

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


def _by_name(value: object) -> object:
    """Return the settings by evaluation of ``knn,linear`` or ``{knn: {k: 10}, linear: {}}``."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse(value, "evaluations")
    if isinstance(value, Mapping):
        return {name: {} if given is None else given for name, given in value.items()}
    names = as_tuple(value)
    return {name: {} for name in names} if isinstance(names, tuple) else value


Grid = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
Grids = Annotated[tuple[Grid, ...], BeforeValidator(_grids)]
Images = Annotated[int, Field(ge=LEAST_IMAGES)]
Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1), BeforeValidator(as_tuple)]
Others = Annotated[dict[str, dict[str, Any]], BeforeValidator(_by_name)]
Blank = Literal["black", "mean"]


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

    by: Literal["regression", "covariance", "blank"] = "regression"
    """What to project out: planes of the regression's weights, RASA in closed form; the plane of
    the covariance; or directions of a blank image, as INSID3.
    """
    planes: PositiveInt | None = None
    """Number of planes, one after the other, up to 15; default: 9. The covariance has one. Of a
    blank image, the number of directions, which are the first singular vectors; default: the
    smallest that leaves R² below 0.05.
    """
    blank: Blank = "black"
    """The blank image: black, or the mean colour."""
    evaluations: Others = {}  # noqa: RUF012 (pydantic copies it)
    """Other evaluations to run before and after, such as knn,linear; or with their settings and
    data, such as {segmentation: {data: camvid, ignore: 11}}.
    """
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
    mosaics: Listed[TwoOrMore] = ()
    """Images a side of larger pictures, such as 2,4. An image's feature is then the mean of its own
    patches there, and the images of its picture do not vote.
    """
    features: Pooling = "mean"
    """Mean of the patch tokens, of the class token, or of ``prefix`` tokens."""
    k: PositiveInt = 20
    """Number of neighbours that vote."""
    num_samples: TwoOrMore = 500
    """Number of images, drawn by the seed."""
