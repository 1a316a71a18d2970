"""How the papers train linear classifiers on frozen features: the figures of each protocol.

What is the same for all: weights from N(0, 0.01²), bias 0, cross-entropy, the rate scaled by batch
/ 256, momentum 0.9.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pospre.evaluation.features import Pooling

Name = Literal[
    "mae",
    "dinov2",
    "vissl",
    "vissl_places205",
    "vissl_inat18",
    "vissl_clevr_count",
    "vissl_clevr_distance",
]
Norm = Literal["none", "batch", "affine"]


@dataclass(frozen=True)
class Protocol:
    """One published way to train linear classifiers.

    Attributes:
        pooling: what stands for a block: its class token, or the mean of its patches.
        blocks: numbers of last blocks whose vectors are joined, one classifier for each number.
        adds_mean: whether each is trained with the last block's mean of the patches added, too.
        norms: what stands before the linear layer, one classifier for each: nothing, batch norm
            without or with weights.
        base_lrs: per 256 images, one classifier for each.
        optimizer: LARS (You et al. 2017) adapts the rate of the weights, not of the bias.
        nesterov: of SGD's momentum.
        weight_decay: of weights and bias, not of the norm.
        epochs: of the bank.
        batch: images per step.
        warmup: epochs in which the rate rises from 0.
        milestones: epochs after which the rate is a tenth; none: it falls by half a cosine.
        floor: share of the peak where the cosine ends.
        crop: how an image is seen: ``center`` (short side to 256/224 of the view) or ``full``.
    """

    pooling: Pooling
    blocks: tuple[int, ...]
    norms: tuple[Norm, ...]
    base_lrs: tuple[float, ...]
    epochs: int
    batch: int
    adds_mean: bool = False
    optimizer: Literal["sgd", "lars"] = "sgd"
    nesterov: bool = False
    weight_decay: float = 0.0
    warmup: float = 0
    milestones: tuple[float, ...] = ()
    floor: float = 0.0
    crop: Literal["center", "full"] = "center"


_VISSL = Protocol(
    pooling="mean",
    blocks=(1, 4),
    norms=("none", "affine"),
    base_lrs=(0.01,),
    epochs=28,
    batch=2048,
    nesterov=True,
    weight_decay=5e-4,
    milestones=(8, 16, 24),
)
_CLEVR = replace(_VISSL, milestones=(), floor=0.01, crop="full")

PROTOCOLS: dict[Name, Protocol] = {
    # He et al. 2022 (arXiv 2111.06377), appendix A.1; LUT's linear columns are of the same code,
    # whose random crops are drawn once and clipped; ours are torchvision's, of up to ten tries
    "mae": Protocol(
        pooling="cls",
        blocks=(1,),
        norms=("batch",),
        base_lrs=(0.1,),
        epochs=90,
        batch=16384,
        optimizer="lars",
        warmup=10,
    ),
    # DINOv2's published code: 12,500 steps of 1024 images are ten epochs of ImageNet
    "dinov2": Protocol(
        pooling="cls",
        blocks=(1, 4),
        norms=("none",),
        base_lrs=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1),
        epochs=10,
        batch=1024,
        adds_mean=True,
    ),
    # I-JEPA and StoP: VISSL's transfer settings, with 64 devices of 32 images
    "vissl": _VISSL,
    "vissl_places205": replace(_VISSL, epochs=14, milestones=(4, 8, 12)),
    "vissl_inat18": replace(_VISSL, epochs=84, milestones=(24, 48, 72)),
    "vissl_clevr_count": replace(_CLEVR, epochs=50),
    "vissl_clevr_distance": replace(_CLEVR, epochs=100),
}
