"""The published steps of SimMIM, I-JEPA, DINOv2 and DeiT, written down plainly: peers of a bench.

As in ``plain_steps``: every patch is embedded, masks are applied where the papers' code applies
them, attention is the same fused kernel as ours. Masks are uniform draws of the counts that ours
have, for what is timed is the step and not the sampler.
"""

import copy

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from pospre.nn.positions.sincos import sincos_positions
from pospre.nn.sizes import EncoderSize
from tests.benchmarks.plain_steps import GRID, PATCH, PlainEncoder, take

NUM = GRID * GRID


def some(batch: int, count: int) -> Tensor:
    """Return ``count`` random patches per image."""
    return torch.rand(batch, NUM).argsort(dim=1)[:, :count]


def follow(student: nn.Module, teacher: nn.Module, momentum: float) -> None:
    """Move the teacher, parameter by parameter."""
    with torch.no_grad():
        for mine, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
            theirs.mul_(momentum).add_(mine, alpha=1 - momentum)


class PlainSimMIM(nn.Module):
    """SimMIM's step: mask tokens at the input, a 1×1 convolution, L1 on all pixels, masked."""

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        self.encoder = PlainEncoder(size)
        self.token = nn.Parameter(torch.zeros(1, 1, size.embed_dim))
        self.predict = nn.Sequential(
            nn.Conv2d(size.embed_dim, PATCH * PATCH * 3, 1), nn.PixelShuffle(PATCH)
        )

    def forward(self, images: Tensor) -> Tensor:
        cells = torch.zeros(len(images), 49)
        cells = cells.scatter(1, torch.rand_like(cells).argsort(1)[:, :30], 1.0)
        mask = cells.view(-1, 7, 7).repeat_interleave(2, 1).repeat_interleave(2, 2)
        weight = mask.flatten(1).unsqueeze(-1)
        tokens = self.encoder.patches(images)
        tokens = tokens * (1 - weight) + self.token * weight + self.encoder.positions
        latent = self.encoder.run(tokens)[:, 1:]
        pixels = self.predict(latent.transpose(1, 2).unflatten(2, (GRID, GRID)))
        mask = mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2).unsqueeze(1)
        return ((pixels - images).abs() * mask).sum() / (mask.sum() + 1e-5) / 3


class PlainIJEPA(nn.Module):
    """I-JEPA's step: context encoder, momentum teacher, one predictor pass per target block."""

    positions: Tensor

    def __init__(self, size: EncoderSize, *, context: int, target: int, width: int = 384) -> None:
        super().__init__()
        self.encoder = PlainEncoder(size)
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.context, self.target = context, target
        self.embed = nn.Linear(size.embed_dim, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        heads = size.num_heads
        self.blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(6)))
        self.norm = LayerNorm(width)
        self.predict = nn.Linear(width, size.embed_dim)
        self.register_buffer("positions", sincos_positions(width, GRID, GRID).unsqueeze(0))

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss of a batch of normalised images, and move the teacher."""
        num = len(images)
        with torch.no_grad():
            whole = self.teacher.patches(images) + self.teacher.positions
            features = F.layer_norm(self.teacher.run(whole)[:, 1:], whole.shape[-1:])
        keep = some(num, self.context)
        tokens = self.encoder.patches(images) + self.encoder.positions
        latent = self.encoder.run(take(tokens, keep))[:, 1:]
        positions = self.positions.repeat(num, 1, 1)
        context = (self.embed(latent) + take(positions, keep)).repeat(4, 1, 1)
        blocks = [some(num, self.target) for _ in range(4)]
        queries = torch.cat([take(positions, block) for block in blocks]) + self.token
        decoded = self.norm(self.blocks(torch.cat([context, queries], dim=1)))
        predicted = self.predict(decoded[:, self.context :])
        loss = F.smooth_l1_loss(predicted, torch.cat([take(features, block) for block in blocks]))
        follow(self.encoder, self.teacher, 0.996)
        return loss


class PlainHead(nn.Module):
    """DINO's head: three layers, normalisation, prototypes."""

    def __init__(self, width: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(),
            nn.Linear(2048, 256),
        )  # fmt: skip
        self.last = nn.Linear(256, prototypes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = F.normalize(self.last.weight, dim=1)
        return F.linear(F.normalize(self.mlp(tokens), dim=-1), weight)


@torch.no_grad()
def sinkhorn(logits: Tensor) -> Tensor:
    """Return assignments whose columns sum to one and whose rows are even."""
    plan = (logits.float() / 0.07).sub_(logits.max() / 0.07).exp().t()
    plan /= plan.sum()
    for _ in range(3):
        plan /= plan.sum(1, keepdim=True) * plan.shape[0]
        plan /= plan.sum(0, keepdim=True) * plan.shape[1]
    return (plan * plan.shape[1]).t()


def cross_entropy(student: Tensor, target: Tensor) -> Tensor:
    """Return −Σ target·log softmax(student/0.1) per row."""
    return -(target * F.log_softmax(student.float() / 0.1, dim=-1)).sum(-1)


class PlainDINOv2(nn.Module):
    """DINOv2's step: two global and eight local crops, shared head, Sinkhorn, KoLeo."""

    def __init__(self, size: EncoderSize, *, prototypes: int) -> None:
        super().__init__()
        self.encoder, self.head = PlainEncoder(size), PlainHead(size.embed_dim, prototypes)
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.token = nn.Parameter(torch.zeros(1, 1, size.embed_dim))

    def encode(self, crops: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode crops of any size, with mask tokens where ``mask`` is set."""
        tokens = self.encoder.patches(crops)
        if mask is not None:
            tokens = torch.where(mask.unsqueeze(-1), self.token, tokens)
        side = int(tokens.shape[1] ** 0.5)
        table = self.encoder.positions.transpose(1, 2).unflatten(2, (GRID, GRID))
        table = F.interpolate(table, size=(side, side), mode="bicubic").flatten(2).transpose(1, 2)
        return self.encoder.run(tokens + table)

    def forward(self, globals_: Tensor, locals_: Tensor) -> Tensor:
        """Return the loss of crops, all images' first crop first, and move the teacher."""
        num = len(globals_) // 2
        with torch.no_grad():
            tokens = self.teacher.run(self.teacher.patches(globals_) + self.teacher.positions)
            targets = sinkhorn(self.teacher_head(tokens[:, 0])).chunk(2)
        mask = torch.zeros(2 * num, NUM, dtype=torch.bool)
        mask[torch.randperm(2 * num)[:num]] = torch.rand(num, NUM) < 0.3
        crop, patch = mask.nonzero(as_tuple=True)
        with torch.no_grad():
            patch_targets = sinkhorn(self.teacher_head(tokens[:, 1:][crop, patch]))
        student, local = self.encode(globals_, mask), self.encode(locals_)
        logits = self.head(student[:, 0]).chunk(2)
        terms = [cross_entropy(logits[0], targets[1]), cross_entropy(logits[1], targets[0])]
        for part in self.head(local[:, 0]).chunk(len(locals_) // num):
            terms += [cross_entropy(part, target) for target in targets]
        dino = torch.stack([term.mean() for term in terms]).sum() / len(terms)
        weight = (1 / mask.sum(1).clamp_min(1))[crop]
        patches = cross_entropy(self.head(student[:, 1:][crop, patch]), patch_targets)
        ibot = (patches * weight).sum() / (2 * num)
        spread = sum((koleo(part) for part in student[:, 0].chunk(2)), torch.zeros(()))
        follow(self.encoder, self.teacher, 0.992)
        follow(self.head, self.teacher_head, 0.992)
        return dino + ibot + 0.1 * spread


def koleo(features: Tensor) -> Tensor:
    """Return minus the mean logarithm of the distance to the nearest other feature."""
    features = F.normalize(features.float(), dim=-1)
    with torch.no_grad():
        nearest = (features @ features.t()).fill_diagonal_(-1).argmax(1)
    return -torch.log((features - features[nearest]).norm(dim=-1) + 1e-8).mean()


class PlainSupervised(nn.Module):
    """A classifier on the class token."""

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        self.encoder, self.head = PlainEncoder(size), nn.Linear(size.embed_dim, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of a batch of normalised images."""
        tokens = self.encoder.run(self.encoder.patches(images) + self.encoder.positions)
        return F.cross_entropy(self.head(tokens[:, 0]), labels)
