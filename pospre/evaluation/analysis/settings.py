"""Settings of the evaluations that look into an encoder."""

from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pospre.evaluation.settings import AboveOne, Compared, Numbers, Sampling, Settings
from pospre.ranges import Ratio

Source = Literal["mean", "cls", "patches"]


@dataclass(frozen=True, kw_only=True)
class Attention(Sampling):
    """Settings of ``attention``.

    Attributes:
        layers: blocks to measure, such as 1,6,12; all without it.
        queries: patches whose maps are drawn, row by row from 0; without it three of them.
        num_pictures: draw the maps of so many images.
        image_size: side of the views in pixels; the encoder's own without it.
    """

    layers: Numbers | None = None
    queries: Numbers | None = None
    num_pictures: NonNegativeInt = 4
    image_size: PositiveInt | None = None
    batch_size: PositiveInt = 32


@dataclass(frozen=True, kw_only=True)
class Field(Settings):
    """Settings of ``field``."""


@dataclass(frozen=True, kw_only=True)
class GradCam(Sampling):
    """Settings of ``grad_cam``.

    Attributes:
        target: the class asked for: the predicted one, or the image's label.
        layer: the block; the last without it.
        num_pictures: draw so many images.
    """

    target: Literal["predicted", "label"] = "predicted"
    layer: PositiveInt | None = None
    num_pictures: PositiveInt = 8
    batch_size: PositiveInt = 32


@dataclass(frozen=True, kw_only=True)
class PositionCorrelation(Sampling):
    """Settings of ``position_correlation``.

    Attributes:
        layer: whose features, after the final norm; 0 is the embedding, without it the last.
    """

    layer: NonNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class Reconstructions(Sampling, Compared):
    """Settings of ``reconstructions``.

    Attributes:
        mask_ratio: share of patches hidden, in (0, 1).
        num_pictures: draw so many images.
    """

    mask_ratio: Ratio = 0.75
    num_pictures: PositiveInt = 6
    batch_size: PositiveInt = 32


@dataclass(frozen=True, kw_only=True)
class RelativeAttention(Sampling):
    """Settings of ``relative_attention``.

    Attributes:
        layers: blocks to measure, such as 2,6,10; all without it.
        num_heads: draw so many heads of each layer, those of the lowest entropy; all without it.
        image_size: side of the views in pixels; the encoder's own without it.
    """

    layers: Numbers | None = None
    num_heads: PositiveInt | None = None
    image_size: PositiveInt | None = None
    batch_size: PositiveInt = 32


@dataclass(frozen=True, kw_only=True)
class Spectrum(Sampling):
    """Settings of ``spectrum``.

    Attributes:
        layers: whose features, such as 0,6,12 (0 is the embedding); all without it.
        features: per image the mean of its patch tokens or its cls token; or patches, all of them.
        norm: features after the encoder's final norm, which every layer then gets. Lengths are
            those before it.
        artefact: tokens this many times longer than the median of their image are artefacts.
        num_pictures: draw the last layer's lengths of so many images.
    """

    layers: Numbers | None = None
    features: Source = "mean"
    norm: bool = True
    artefact: AboveOne = 3.0
    num_pictures: NonNegativeInt = 4
    batch_size: PositiveInt = 32


@dataclass(frozen=True, kw_only=True)
class StopHeatmaps(Sampling):
    """Settings of ``stop_heatmaps``.

    Attributes:
        temperature: of the softmax; the paper states none.
        num_pictures: draw the maps of so many images, of one hidden patch each.
    """

    temperature: PositiveFloat = 0.1
    num_pictures: PositiveInt = 6
    batch_size: PositiveInt = 32


@dataclass(frozen=True, kw_only=True)
class StopSimilarity(Settings):
    """Settings of ``stop_similarity``.

    Attributes:
        queries: positions whose maps are drawn, row by row from 0; without it three of them.
        num_draws: draws of the noise at every position.
        seed: of the noise.
    """

    queries: Numbers | None = None
    num_draws: PositiveInt = 64
    seed: int = 0
