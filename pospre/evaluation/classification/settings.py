"""Settings of the evaluations that classify images."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from pospre.evaluation.common_settings import (
    Halved,
    Listed,
    Numbers,
    Pooling,
    Sampling,
    TwoOrMore,
)
from pospre.ranges import PositiveShare, Ratio

ProtocolName = Literal[
    "mae",
    "dinov2",
    "vissl",
    "vissl_places205",
    "vissl_inat18",
    "vissl_clevr_count",
    "vissl_clevr_distance",
]


class Accuracy(Sampling):
    """Settings of ``accuracy``."""

    ensemble: Listed[str] = ()
    """Other fine-tuned runs or checkpoints, with commas; class probabilities are averaged."""


class Knn(Sampling, Halved):
    """Settings of ``knn``."""

    bank: str | None = None
    """Data set of the voters, such as the training set; without it, all other images vote."""
    k: PositiveInt = 20
    """Number of neighbours that vote."""
    temperature: PositiveFloat = 0.07
    """T; smaller values favour the nearest neighbours."""
    features: Pooling = "mean"
    """Mean of the patch tokens; the class token, which MAE and DropPos do not train; or ``prefix``,
    the mean of class token and registers (Pixio's class tokens).
    """
    layers: Numbers | Literal["all"] | None = None
    """Layers to measure, such as 0,6,12, or all. 0 is the input of the first block, 1 its output;
    the encoder's final norm is applied to each. Default: the last.
    """
    num_bank: PositiveInt | None = None
    """Number of bank images that vote, drawn by the seed; default: all."""


class Linear(Sampling, Halved):
    """Settings of ``linear``."""

    protocol: ProtocolName
    """``mae`` is also LUT's; ``vissl_…`` are those for these data."""
    bank: str
    """Data set to train the classifiers on, for instance the training set."""
    label_fraction: PositiveShare = 1.0
    """Share of the bank to train on, the same number per class, drawn by the seed: 0.01, 0.1."""
    labels: str | None = None
    """Text file that lists the images to train on, one per line, as published for 1 %."""
    features: Pooling | None = None
    """Mean of the patch tokens, of the class token, or of ``prefix`` tokens (class token and
    registers); default: the protocol's.
    """
    epochs: PositiveInt | None = None
    """Training epochs; default: the protocol's. Warm-up and milestones scale with it."""
    batch: TwoOrMore | None = None
    """Images per step; default: the protocol's."""
    base_lr: PositiveFloat | None = None
    """Learning rate per 256 images; default: the protocol's, or its list."""
    augment: bool = False
    """Encode the bank anew in every epoch, with random crops and flips, as published."""


class Logistic(Sampling, Halved):
    """Settings of ``logistic``."""

    bank: str
    """Data set to fit the classifier to, for instance the training set."""
    protocol: Literal["stop"] | None = None
    """``stop`` is StoP's (see above), to compare with its table 1; null: ours."""
    features: Pooling = "mean"
    """Mean of the patch tokens, of the class token, or of ``prefix`` tokens (class token and
    registers), after the encoder's final norm.
    """
    iterations: PositiveInt = 100
    """Maximal number of L-BFGS iterations."""
    weight_decay: PositiveFloat | None = None
    """Of cross-entropy + weight_decay/2·‖weights‖²; default: the best of a few, or the protocol's.
    """
    label_fraction: PositiveShare = 1.0
    """Share of the bank to fit to, the same number per class, drawn by the seed: 0.01, 0.1."""
    labels: str | None = None
    """Text file that lists the images to fit to, one per line, as published for 1 %."""
    num_bank: PositiveInt | None = None
    """Number of bank images to fit to, drawn by the seed; default: all."""


class Robustness(Sampling):
    """Settings of ``robustness``."""

    sets: Listed[str] = ()
    """Further data sets, with commas. Folders have the names or numbers of classes, and only these
    are predicted.
    """
    lists: str | None = None
    """JSON file, {"folder": ["class", …], …}, for sets whose folders match several classes, all of
    them right (SI-Score, ObjectNet).
    """
    outliers: str | None = None
    """Data set of other classes (ImageNet-O), with or without labels."""
    reassessed: str | None = None
    """JSON file with all right classes of each image (ImageNet-ReaL), matched by the numbers in
    file names; images without any are left out.
    """
    occlusion: PositiveShare = 0.5
    """Side of the painted box, as a share of the image's; the paper does not give it."""
    patch_drop: Listed[Ratio] = (0.25, 0.5, 0.75)
    """Shares of the encoder's patches to paint, such as 0.25,0.5."""
    tiles: Listed[TwoOrMore] = (2,)
    """Rows and columns of tiles to shuffle, such as 2,4; they divide the image."""
    shift: PositiveInt = 1
    """Shift positions by this many patches, if the encoder supports it."""
    scale: PositiveShare = 0.5
    """Share of the image whose positions are stretched over all of it."""
