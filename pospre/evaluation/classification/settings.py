"""Settings of the evaluations that classify images."""

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from pospre.evaluation.settings import (
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


@dataclass(frozen=True, kw_only=True)
class Accuracy(Sampling):
    """Settings of ``accuracy``.

    Attributes:
        ensemble: run folders or checkpoints of other fine-tuned models, with commas between them,
            whose probabilities are averaged with this one's.
    """

    ensemble: Listed[str] = ()


@dataclass(frozen=True, kw_only=True)
class Knn(Sampling, Compared):
    """Settings of ``knn``.

    Attributes:
        bank: data set whose images vote, for instance the training set; without it every image
            measured is classified by all the others.
        k: how many neighbours vote.
        temperature: T; the smaller, the more the nearest ones count.
        features: mean of the patch tokens, or the cls token. The default is mean, because neither
            MAE nor DropPos puts a loss on the class token.
        layers: measure these layers, such as 0,6,12, or all of them: 0 is what goes into the first
            block, 1 what comes out of it; each after the encoder's final norm. Without it the last.
        num_bank: let so many images of the bank vote, drawn by the seed; all without it.
    """

    bank: str | None = None
    k: PositiveInt = 20
    temperature: PositiveFloat = 0.07
    features: Pooling = "mean"
    layers: Numbers | Literal["all"] | None = None
    num_bank: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class Linear(Sampling, Compared):
    """Settings of ``linear``.

    Attributes:
        protocol: mae (LUT's as well), dinov2, vissl, or vissl_places205, vissl_inat18,
            vissl_clevr_count and vissl_clevr_distance for these data.
        bank: data set that the classifiers are trained on, for instance the training set.
        label_fraction: train on this share of the bank, as many images of each class, drawn by the
            seed; 0.01 and 0.1 are usual.
        labels: train on the images that this text file names, one in each line, such as a published
            list of 1 %.
        features: mean of the patch tokens, or the cls token; the protocol's without it.
        epochs: of training; the protocol's without it. Warm-up and milestones shrink in proportion.
        batch: images per step; the protocol's without it.
        base_lr: learning rate per 256 images; the protocol's, or its list, without it.
        augment: train on new random crops and flips in every epoch, as published; the bank is then
            encoded anew for each.
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


@dataclass(frozen=True, kw_only=True)
class Logistic(Sampling, Compared):
    """Settings of ``logistic``.

    Attributes:
        bank: data set that the classifier is fitted to, for instance the training set.
        protocol: stop for StoP's (see above), to compare with its table 1; null for ours.
        features: mean of the patch tokens, or the cls token, after the encoder's final norm.
        iterations: at most so many of L-BFGS.
        weight_decay: of cross-entropy + weight_decay/2·‖weights‖²; without it the best of a few, or
            the protocol's.
        label_fraction: fit to this share of the bank, as many images of each class, drawn by the
            seed; 0.01 and 0.1 are usual.
        labels: fit to the images that this text file names, one in each line, such as a published
            list of 1 %.
        num_bank: fit to so many images of the bank, drawn by the seed; all without it.
    """

    bank: str
    protocol: Literal["stop"] | None = None
    features: Pooling = "mean"
    iterations: PositiveInt = 100
    weight_decay: PositiveFloat | None = None
    label_fraction: PositiveShare = 1.0
    labels: str | None = None
    num_bank: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class Robustness(Sampling):
    """Settings of ``robustness``.

    Attributes:
        sets: further data sets, with commas between them; a folder is called as the class it shows,
            or has its number, and answers are taken from the classes that have a folder.
        lists: JSON file, {"folder": ["class", …], …}, for sets whose folders stand for several
            classes, all of them right (SI-Score, ObjectNet).
        outliers: data set of none of these classes (ImageNet-O), with labels or without.
        reassessed: JSON file with all right classes of each image of data (ImageNet-ReaL), found by
            the numbers in the files' names; images without any are left out.
        occlusion: side of the painted box, as a share of the image's; the paper gives none.
        patch_drop: shares of the encoder's patches that are painted, such as 0.25,0.5.
        tiles: rows and columns of tiles that are shuffled, such as 2,4; they divide the image.
        shift: patches by which positions are shifted, where the encoder knows any.
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
