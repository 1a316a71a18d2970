"""Published protocols of linear classifiers on frozen features, all trained at once.

Common to all: weights from N(0, 0.01²), bias 0, cross-entropy, learning rate scaled by batch / 256,
momentum 0.9. The classifiers share only the images of every step: each learns as if alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from timm.optim import Lars
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from pospre import draws
from pospre.evaluation.classification.settings import ProtocolName
from pospre.evaluation.common_settings import Pooling
from pospre.evaluation.features import Part, Parts
from pospre.schedules import staircase

Norm = Literal["none", "batch", "affine"]


@dataclass(frozen=True)
class Protocol:
    """One published way to train linear classifiers.

    Attributes:
        pooling: the vector of a block: its class token, or the mean of its patches.
        blocks: numbers of last blocks whose vectors are concatenated, one classifier per number.
        adds_mean: whether to also train each with the last block's mean of patches appended.
        norms: the layer before the linear one, one classifier each: none, or batch norm without or
            with weights.
        base_lrs: per 256 images, one classifier each.
        optimizer: LARS (You et al. 2017) adapts the rate of the weights, not of the bias.
        weight_decay: weight decay of weights and bias, not of the norm.
        warmup: epochs in which the rate rises from 0.
        milestones: epochs after which the rate is divided by 10; none: half a cosine.
        floor: final share of the peak rate with the cosine.
        crop: view of an image: ``center`` (short side to 256/224 of the view) or ``full``.
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

PROTOCOLS: dict[ProtocolName, Protocol] = {
    # He et al. 2022 (arXiv 2111.06377), appendix A.1; LUT's linear columns use the same code. Its
    # random crops are drawn once and clipped; ours are torchvision's, with up to ten tries
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


_AT_ONCE = 4096  # images classified in one piece


@dataclass(frozen=True)
class Features:
    """Input of a classifier: vectors concatenated in this order."""

    parts: tuple[Part, ...]

    def join(self, vectors: Parts) -> Tensor:
        """Return (M, Σ D)."""
        return torch.cat([vectors[part] for part in self.parts], dim=1)

    def __str__(self) -> str:
        pooling = self.parts[0][1]
        blocks = sum(other == pooling for _, other in self.parts)
        added = " + mean" if blocks < len(self.parts) else ""
        return f"{pooling} of the last {'block' if blocks == 1 else f'{blocks} blocks'}{added}"


@dataclass(frozen=True)
class Kind:
    """The options that distinguish one classifier from the others."""

    features: Features
    norm: Norm
    base_lr: float


class LinearHead(nn.Module):
    """An optional norm and a linear layer, initialised with a generator."""

    def __init__(self, kind: Kind, dim: int, classes: int, draw: torch.Generator) -> None:
        super().__init__()
        self.kind, width = kind, dim * len(kind.features.parts)
        affine = kind.norm == "affine"
        self.norm = (
            nn.Identity()
            if kind.norm == "none"
            else nn.BatchNorm1d(width, affine=affine, eps=1e-5 if affine else 1e-6)
        )
        self.linear = nn.Linear(width, classes)
        nn.init.normal_(self.linear.weight, std=0.01, generator=draw)
        nn.init.zeros_(self.linear.bias)

    def forward(self, vectors: Parts) -> Tensor:
        """Return logits (B, C)."""
        logits: Tensor = self.linear(self.norm(self.kind.features.join(vectors)))
        return logits


def kinds_of(protocol: Protocol, pooling: Pooling, depth: int) -> list[Kind]:
    """Return the classifiers that a protocol trains on an encoder of ``depth`` blocks."""
    joined: list[tuple[Part, ...]] = []
    for count in protocol.blocks:
        own = tuple((layer, pooling) for layer in range(depth + 1 - count, depth + 1))
        more = (*own, (depth, "mean")) if protocol.adds_mean and pooling == "cls" else ()
        joined += [own, more] if more else [own]
    return [
        Kind(Features(parts), norm, base_lr)
        for parts in joined
        for norm in protocol.norms
        for base_lr in protocol.base_lrs
    ]


@torch.enable_grad()
def train_heads(
    kinds: Sequence[Kind],
    protocol: Protocol,
    banks: Iterable[Parts],
    label_M: Tensor,
    num_classes: int,
    *,
    dim: int,
    seed: int,
    device: torch.device,
) -> list[LinearHead]:
    """Return trained classifiers, in eval mode.

    ``banks`` has each epoch's vectors (M, dim) by part; a bank smaller than a batch is one batch.
    ``seed`` draws the weights and the order of images.
    """
    draw = torch.Generator().manual_seed(seed)
    label_M = label_M.to(device)
    heads = [LinearHead(kind, dim, num_classes, draw) for kind in kinds]
    whole = nn.ModuleList(heads).to(device).train()
    batch = min(protocol.batch, len(label_M))
    steps = len(label_M) // batch
    optimizer = _optimizer(heads, protocol, batch)
    schedule = LambdaLR(
        optimizer, lambda step: rate(protocol, step // steps + step % steps / steps)
    )
    for epoch, bank in enumerate(banks):
        vectors = {part: values.to(device) for part, values in bank.items()}
        order = torch.from_numpy(draws.order(seed, epoch, len(label_M))).to(device)
        for step in range(steps):
            rows = order[step * batch : (step + 1) * batch]
            seen = {part: values[rows] for part, values in vectors.items()}
            loss = torch.stack([F.cross_entropy(head(seen), label_M[rows]) for head in heads]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    whole.eval()
    return heads


def rate(protocol: Protocol, epoch: float) -> float:
    """Return the learning rate at ``epoch``, as a share of its peak."""
    if epoch < protocol.warmup:
        return epoch / protocol.warmup
    if protocol.milestones:
        return staircase(epoch, milestones=protocol.milestones, gamma=0.1)
    done = (epoch - protocol.warmup) / (protocol.epochs - protocol.warmup)
    return protocol.floor + (1 - protocol.floor) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def classify(head: LinearHead, vectors: Parts, device: torch.device) -> Tensor:
    """Return the class (M,) of every image, on the CPU."""
    count = len(next(iter(vectors.values())))
    answers = [torch.zeros(0, dtype=torch.int64, device=device)]
    for start in range(0, count, _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        answers.append(head({part: v[rows].to(device) for part, v in vectors.items()}).argmax(1))
    return torch.cat(answers).cpu()


def _optimizer(
    heads: Sequence[LinearHead], protocol: Protocol, batch: int
) -> torch.optim.Optimizer:
    groups = []
    for head in heads:
        lr, decay = head.kind.base_lr * batch / 256, protocol.weight_decay
        groups += [
            {"params": [head.linear.weight], "lr": lr, "weight_decay": decay, "always_adapt": True},
            {"params": [head.linear.bias], "lr": lr, "weight_decay": decay},
        ]
        if head.kind.norm == "affine":
            groups.append({"params": [*head.norm.parameters()], "lr": lr, "weight_decay": 0.0})
    if protocol.optimizer == "lars":
        return Lars(groups, momentum=0.9)
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=protocol.nesterov)
