"""Settings of the evaluations that analyse an encoder."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pospre.evaluation.common_settings import (
    AboveOne,
    Compared,
    Numbers,
    OpenRatio,
    Pooling,
    Sampling,
    Settings,
)

Source = Literal["mean", "cls", "patches"]


class Attention(Sampling):
    """Settings of ``attention``."""

    layers: Numbers | None = None
    """Blocks to measure, such as 1,6,12; default: all."""
    queries: Numbers | None = None
    """Patches whose maps are drawn, row-major from 0; default: three of them."""
    num_pictures: NonNegativeInt = 4
    """Number of images to draw maps of."""
    image_size: PositiveInt | None = None
    """Side of the views in pixels; default: the encoder's."""
    batch_size: PositiveInt = 32


class Drift(Sampling, Compared):
    """Settings of ``drift``."""

    MEASURED_AT: ClassVar = "stages"
    num_samples: PositiveInt = 500
    """Number of images, drawn by the seed: one half to fit maps on, the other to measure."""
    layers: Numbers | None = None
    """Blocks to measure, such as 6,12; default: all."""
    batch_size: PositiveInt = 32


class Duplicates(Sampling):
    """Settings of ``duplicates``."""

    MEASURED_AT: ClassVar = "start"
    num_samples: PositiveInt = 10_000
    """Number of images, drawn by the seed, that are compared with each other."""
    similarity: OpenRatio = 0.99
    """Cosine above which two images are nearly the same."""
    features: Pooling | None = None
    """Class token, or mean of the patch or prefix tokens; default: the class token, if there is
    one, else the mean.
    """


class Field(Settings):
    """Settings of ``field``."""


class GradCam(Sampling):
    """Settings of ``grad_cam``."""

    target: Literal["predicted", "label"] = "predicted"
    """The class to explain: the predicted one, or the image's label."""
    layer: PositiveInt | None = None
    """Block to read; default: the last."""
    num_pictures: PositiveInt = 8
    """Number of images to draw."""
    batch_size: PositiveInt = 32


class PositionCorrelation(Sampling):
    """Settings of ``position_correlation``."""

    layer: NonNegativeInt | None = None
    """Layer to read, after the final norm; 0 is the embedding. Default: the last."""


class Reconstructions(Sampling, Compared):
    """Settings of ``reconstructions``."""

    mask_ratio: OpenRatio = 0.75
    """Share of hidden patches."""
    num_pictures: PositiveInt = 6
    """Number of images to draw."""
    batch_size: PositiveInt = 32


class RelativeAttention(Sampling):
    """Settings of ``relative_attention``."""

    layers: Numbers | None = None
    """Blocks to measure, such as 2,6,10; default: all."""
    num_heads: PositiveInt | None = None
    """Number of heads to draw per layer, lowest entropy first; default: all."""
    image_size: PositiveInt | None = None
    """Side of the views in pixels; default: the encoder's."""
    batch_size: PositiveInt = 32


class Spectrum(Sampling):
    """Settings of ``spectrum``."""

    layers: Numbers | None = None
    """Layers to measure, such as 0,6,12 (0 is the embedding); default: all."""
    features: Source = "mean"
    """``mean`` of an image's patch tokens, its ``cls`` token, or all ``patches``."""
    norm: bool = True
    """Apply the encoder's final norm to every layer; lengths are those before it."""
    artefact: AboveOne = 3.0
    """Tokens this many times longer than their image's median are artefacts."""
    num_pictures: NonNegativeInt = 4
    """Number of images whose last-layer lengths are drawn."""
    batch_size: PositiveInt = 32


class PredictionHeatmaps(Sampling):
    """Settings of ``prediction_heatmaps``."""

    temperature: PositiveFloat = 0.1
    """Temperature of the softmax; the paper does not give it."""
    num_pictures: PositiveInt = 6
    """Number of images to draw, each with the map of one hidden patch."""
    batch_size: PositiveInt = 32


class StopSimilarity(Settings):
    """Settings of ``stop_similarity``."""

    queries: Numbers | None = None
    """Positions whose maps are drawn, row-major from 0; default: three of them."""
    num_draws: PositiveInt = 64
    """Noise draws per position."""
    seed: int = 0
    """Seed of the noise."""
