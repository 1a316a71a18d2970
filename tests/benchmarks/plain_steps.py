"""The published training steps of MAE and DropPos, written down plainly: the peer of bench_step.

Every patch is embedded before the visible ones are gathered, the decoder is unshuffled by index,
and every token is predicted before the loss is masked, as the papers' own code does. Attention is
the same fused kernel as ours, and DropPos's position tokens are repeated per sample (the published
code repeats them over the whole batch, which only costs memory).
"""

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from pospre.nn.encoder_interface import patchify
from pospre.nn.positions.sincos import sincos_positions
from pospre.nn.sizes import EncoderSize

GRID, PATCH = 14, 16


def random_masking(tokens: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return kept indices, the restoring permutation and the 0/1 mask of removed tokens."""
    batch, length, _ = tokens.shape
    kept = int(length * (1 - ratio))
    shuffle = torch.rand(batch, length).argsort(dim=1)
    restore = shuffle.argsort(dim=1)
    mask = torch.ones(batch, length)
    mask[:, :kept] = 0
    return shuffle[:, :kept], restore, mask.gather(1, restore)


def take(tokens: Tensor, index: Tensor) -> Tensor:
    return tokens.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


class PlainEncoder(nn.Module):
    """Patch embedding, class token, fixed positions and blocks, without any masking."""

    positions: Tensor

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, size.embed_dim, PATCH, PATCH)
        self.cls = nn.Parameter(torch.zeros(1, 1, size.embed_dim))
        self.blocks = nn.Sequential(
            *(Block(size.embed_dim, size.num_heads, qkv_bias=True) for _ in range(size.depth))
        )
        self.norm = LayerNorm(size.embed_dim)
        positions = sincos_positions(size.embed_dim, GRID, GRID).unsqueeze(0)
        self.register_buffer("positions", positions)

    def patches(self, images: Tensor) -> Tensor:
        """Embed every patch, without positions."""
        return self.embed(images).flatten(2).transpose(1, 2)

    def run(self, tokens: Tensor) -> Tensor:
        """Prepend the class token and run the blocks."""
        tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], dim=1)
        return self.norm(self.blocks(tokens))


class PlainDecoder(nn.Module):
    """Linear, blocks, norm, linear."""

    def __init__(self, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, 512)
        self.blocks = nn.Sequential(*(Block(512, 16, qkv_bias=True) for _ in range(depth)))
        self.norm = LayerNorm(512)
        self.predict = nn.Linear(512, outputs)

    def run(self, tokens: Tensor) -> Tensor:
        """Decode tokens that are already embedded."""
        return self.predict(self.norm(self.blocks(tokens)))


class PlainMAE(nn.Module):
    """MAE's step as published: mask 75 %, decode all tokens, mask the loss."""

    positions: Tensor

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        self.encoder = PlainEncoder(size)
        self.decoder = PlainDecoder(size.embed_dim, 8, PATCH * PATCH * 3)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 512))
        self.register_buffer("positions", sincos_positions(512, GRID, GRID).unsqueeze(0))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.encoder.patches(images) + self.encoder.positions
        keep, restore, mask = random_masking(tokens, 0.75)
        latent = self.decoder.embed(self.encoder.run(take(tokens, keep)))
        fill = self.mask_token.repeat(len(latent), restore.shape[1] + 1 - latent.shape[1], 1)
        body = take(torch.cat([latent[:, 1:], fill.to(latent.dtype)], dim=1), restore)
        decoded = self.decoder.run(torch.cat([latent[:, :1], body + self.positions], dim=1))[:, 1:]
        target = patchify(images, (PATCH, PATCH))
        mean, variance = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        error = (decoded - (target - mean) / (variance + 1e-6) ** 0.5) ** 2
        return (error.mean(-1) * mask).sum() / mask.sum()


class PlainDropPos(nn.Module):
    """DropPos's step as published: two maskings, the full-image affinity pass, smoothed labels."""

    def __init__(self, size: EncoderSize, *, affinity: bool) -> None:
        super().__init__()
        self.encoder = PlainEncoder(size)
        self.decoder = PlainDecoder(size.embed_dim, 2, GRID * GRID)
        self.token = nn.Parameter(torch.zeros(1, 1, size.embed_dim))
        self.affinity = affinity

    @torch.no_grad()
    def similarity(self, images: Tensor) -> Tensor:
        """Return the softmax of class-patch similarities over the full image."""
        tokens = self.encoder.run(self.encoder.patches(images) + self.encoder.positions)
        cosine = F.cosine_similarity(tokens[:, :1], tokens[:, 1:], dim=-1)
        return F.softmax(cosine / 0.1, dim=-1)

    def forward(self, images: Tensor, smooth: Tensor) -> Tensor:
        """Return the loss of a batch; ``smooth`` (N, N) holds the soft labels."""
        tokens = self.encoder.patches(images)
        keep, _, _ = random_masking(tokens, 0.75)
        tokens = take(tokens, keep)
        visible = take(self.encoder.positions.repeat(len(images), 1, 1), keep).detach()
        keep_slots, restore, weight = random_masking(tokens, 0.75)
        shown = take(visible, keep_slots)
        dropped = self.token.repeat(len(images), keep.shape[1] - shown.shape[1], 1)
        tokens = tokens + take(torch.cat([shown, dropped], dim=1), restore)
        logits = self.decoder.run(self.decoder.embed(self.encoder.run(tokens)))[:, 1:]
        if self.affinity:  # published before the encoder: under autocast that loses its gradients
            similarity = self.similarity(images).gather(1, keep)
            weight = weight * (similarity / similarity.sum(-1, keepdim=True))
        labels = take(smooth.repeat(len(images), 1, 1), keep)
        loss = -(labels * F.log_softmax(logits, dim=-1)).sum(-1) * weight
        return loss.sum() / weight.sum()
