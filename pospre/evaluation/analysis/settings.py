"""Settings of the evaluations that analyse an encoder."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pospre.evaluation.common_settings import (
    AboveOne,
    Compared,
    Numbers,
    OpenRatio,
    Sampling,
    Settings,
)

Source = Literal["mean", "cls", "patches"]


class Attention(Sampling):
    """Settings of ``attention``.

    Attributes:
        layers: blocks to measure, such as 1,6,12; default: all.
        queries: patches whose maps are drawn, row-major from 0; default: three of them.
        num_pictures: number of images to draw maps of.
        image_size: side of the views in pixels; default: the encoder's.
    """

    layers: Numbers | None = None
    queries: Numbers | None = None
    num_pictures: NonNegativeInt = 4
    image_size: PositiveInt | None = None
    batch_size: PositiveInt = 32


class Field(Settings):
    """Settings of ``field``."""


class GradCam(Sampling):
    """Settings of ``grad_cam``.

    Attributes:
        target: the class to explain: the predicted one, or the image's label.
        layer: the block; default: the last.
        num_pictures: number of images to draw.
    """

    target: Literal["predicted", "label"] = "predicted"
    layer: PositiveInt | None = None
    num_pictures: PositiveInt = 8
    batch_size: PositiveInt = 32


class PositionCorrelation(Sampling):
    """Settings of ``position_correlation``.

    Attributes:
        layer: its features after the final norm; 0 is the embedding; default: the last.
    """

    layer: NonNegativeInt | None = None


class Reconstructions(Sampling, Compared):
    """Settings of ``reconstructions``.

    Attributes:
        mask_ratio: share of hidden patches.
        num_pictures: number of images to draw.
    """

    mask_ratio: OpenRatio = 0.75
    num_pictures: PositiveInt = 6
    batch_size: PositiveInt = 32


class RelativeAttention(Sampling):
    """Settings of ``relative_attention``.

    Attributes:
        layers: blocks to measure, such as 2,6,10; default: all.
        num_heads: number of heads to draw per layer, lowest entropy first; default: all.
        image_size: side of the views in pixels; default: the encoder's.
    """

    layers: Numbers | None = None
    num_heads: PositiveInt | None = None
    image_size: PositiveInt | None = None
    batch_size: PositiveInt = 32


class Spectrum(Sampling):
    """Settings of ``spectrum``.

    Attributes:
        layers: layers to measure, such as 0,6,12 (0 is the embedding); default: all.
        features: one vector per image, the mean of its patch tokens or its cls token; or all
            patches.
        norm: apply the encoder's final norm to the features of every layer. Lengths are always
            those before it.
        artefact: tokens this many times longer than their image's median are artefacts.
        num_pictures: number of images whose last-layer lengths are drawn.
    """

    layers: Numbers | None = None
    features: Source = "mean"
    norm: bool = True
    artefact: AboveOne = 3.0
    num_pictures: NonNegativeInt = 4
    batch_size: PositiveInt = 32


class StopHeatmaps(Sampling):
    """Settings of ``stop_heatmaps``.

    Attributes:
        temperature: temperature of the softmax; the paper does not give it.
        num_pictures: number of images to draw, each with the map of one hidden patch.
    """

    temperature: PositiveFloat = 0.1
    num_pictures: PositiveInt = 6
    batch_size: PositiveInt = 32


class StopSimilarity(Settings):
    """Settings of ``stop_similarity``.

    Attributes:
        queries: positions whose maps are drawn, row-major from 0; default: three of them.
        num_draws: noise draws per position.
        seed: seed of the noise.
    """

    queries: Numbers | None = None
    num_draws: PositiveInt = 64
    seed: int = 0
