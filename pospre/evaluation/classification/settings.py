"""Settings of the evaluations that classify images."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from pospre.evaluation.common_settings import (
    Compared,
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
    """Settings of ``accuracy``.

    Attributes:
        ensemble: run folders or checkpoints of other fine-tuned models, separated by commas; class
            probabilities are averaged.
    """

    ensemble: Listed[str] = ()


class Knn(Sampling, Compared):
    """Settings of ``knn``.

    Attributes:
        bank: data set of the voters, for instance the training set; without it every image is
            classified by all others.
        k: number of neighbours that vote.
        temperature: T; smaller values favour the nearest neighbours.
        features: mean of the patch tokens, or the cls token. The default is mean, because neither
            MAE nor DropPos trains the class token.
        layers: layers to measure, such as 0,6,12, or all. 0 is the input of the first block, 1 its
            output; the encoder's final norm is applied to each. Default: the last.
        num_bank: number of bank images that vote, drawn by the seed; default: all.
    """

    bank: str | None = None
    k: PositiveInt = 20
    temperature: PositiveFloat = 0.07
    features: Pooling = "mean"
    layers: Numbers | Literal["all"] | None = None
    num_bank: PositiveInt | None = None


class Linear(Sampling, Compared):
    """Settings of ``linear``.

    Attributes:
        protocol: mae (also LUT's), dinov2, vissl, or vissl_places205, vissl_inat18,
            vissl_clevr_count and vissl_clevr_distance for these data.
        bank: data set to train the classifiers on, for instance the training set.
        label_fraction: train on this share of the bank, the same number of images per class, drawn
            by the seed; 0.01 and 0.1 are usual.
        labels: train on the images listed in this text file, one per line, such as a published list
            of 1 %.
        features: mean of the patch tokens, or the cls token; default: the protocol's.
        epochs: training epochs; default: the protocol's. Warm-up and milestones scale with it.
        batch: images per step; default: the protocol's.
        base_lr: learning rate per 256 images; default: the protocol's, or its list.
        augment: train on new random crops and flips in every epoch, as published; the bank is then
            encoded in every epoch.
    """

    protocol: ProtocolName
    bank: str
    label_fraction: PositiveShare = 1.0
    labels: str | None = None
    features: Pooling | None = None
    epochs: PositiveInt | None = None
    batch: TwoOrMore | None = None
    base_lr: PositiveFloat | None = None
    augment: bool = False


class Logistic(Sampling, Compared):
    """Settings of ``logistic``.

    Attributes:
        bank: data set to fit the classifier to, for instance the training set.
        protocol: stop for StoP's (see above), to compare with its table 1; null for ours.
        features: mean of the patch tokens, or the cls token, after the encoder's final norm.
        iterations: maximal number of L-BFGS iterations.
        weight_decay: minimises cross-entropy + weight_decay/2·‖weights‖²; default: the best of a
            few, or the protocol's.
        label_fraction: fit to this share of the bank, the same number of images per class, drawn by
            the seed; 0.01 and 0.1 are usual.
        labels: fit to the images listed in this text file, one per line, such as a published list
            of 1 %.
        num_bank: number of bank images to fit to, drawn by the seed; default: all.
    """

    bank: str
    protocol: Literal["stop"] | None = None
    features: Pooling = "mean"
    iterations: PositiveInt = 100
    weight_decay: PositiveFloat | None = None
    label_fraction: PositiveShare = 1.0
    labels: str | None = None
    num_bank: PositiveInt | None = None


class Robustness(Sampling):
    """Settings of ``robustness``.

    Attributes:
        sets: further data sets, separated by commas. Folders have the names or numbers of classes,
            and predictions are restricted to classes with a folder.
        lists: JSON file, {"folder": ["class", …], …}, for sets whose folders match several classes,
            all of them right (SI-Score, ObjectNet).
        outliers: data set of other classes (ImageNet-O), with or without labels.
        reassessed: JSON file with all right classes of each image of data (ImageNet-ReaL), matched
            by the numbers in file names; images without any are left out.
        occlusion: side of the painted box, as a share of the image's; the paper does not give it.
        patch_drop: shares of the encoder's patches to paint, such as 0.25,0.5.
        tiles: rows and columns of tiles to shuffle, such as 2,4; they divide the image.
        shift: shift positions by this many patches, if the encoder supports it.
        scale: share of the image whose positions are stretched over all of it.
    """

    sets: Listed[str] = ()
    lists: str | None = None
    outliers: str | None = None
    reassessed: str | None = None
    occlusion: PositiveShare = 0.5
    patch_drop: Listed[Ratio] = (0.25, 0.5, 0.75)
    tiles: Listed[TwoOrMore] = (2,)
    shift: PositiveInt = 1
    scale: PositiveShare = 0.5
