"""The predictor of features at chosen positions, and the parts of it that algorithms replace."""

import torch
from timm.layers import LayerNorm
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.nn.decoder import decoder_blocks
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import gather_tokens
from pospre.nn.positions import decoder_positions, sincos_positions


class PredictorTokens(nn.Module):
    """What enters the predictor before positions are added; StoP replaces it.

    Attributes:
        noise_std: standard deviation of the noise before its projection; 0: none is added.
    """

    noise_std: float = 0.0

    def forward(
        self,
        context_BKD: Tensor,
        targets_BMT: Tensor,
        mask_token: Tensor,
        embed: nn.Linear,
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens of the context, (B, K, d), and of the target blocks, (B, M, T, d).

        Args:
            context_BKD: the encoder's tokens of the context.
            targets_BMT: the positions to predict, for their number.
            mask_token: (1, 1, d), learned.
            embed: projects the encoder's tokens to the predictor's width.
            batch: may hold noise.
        """
        return embed(context_BKD), mask_token.expand(*targets_BMT.shape, -1)


class PredictorPositions(nn.Module):
    """The predictor's own sin-cos positions, or those of the view's box in a position field."""

    def __init__(self, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.position_ND: Tensor
        self.register_buffer("position_ND", sincos_positions(dim, *grid), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return (N, d), or (B, N, d) where samples differ."""
        return decoder_positions(self.position_ND, batch, self.grid)


class Predictor(nn.Module):
    """A narrow transformer over the context and the mask tokens of one target block at a time.

    Attributes:
        tokens: makes the input from context and mask token.
        positions: gives the positions that are added to it.
    """

    def __init__(
        self, encoder_dim: int, grid: tuple[int, int], *, dim: int, depth: int, num_heads: int
    ) -> None:
        super().__init__()
        self.dim = dim
        self.embed = nn.Linear(encoder_dim, dim)
        self.blocks = decoder_blocks(dim, depth, num_heads)
        self.norm = LayerNorm(dim)
        init_trunc_normal(self)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        self.tokens = PredictorTokens()
        self.positions: nn.Module = PredictorPositions(dim, grid)

    def forward(
        self, context_BKD: Tensor, keep_BK: Tensor, targets_BMT: Tensor, batch: Batch
    ) -> Tensor:
        """Return features at the target positions, (B, M, T, d), after the last norm.

        Args:
            context_BKD: the encoder's tokens of the context.
            keep_BK: their positions.
            targets_BMT: the positions of M target blocks.
            batch: may hold noise, and boxes in a position field.
        """
        context, masked = self.tokens(context_BKD, targets_BMT, self.mask_token, self.embed, batch)
        position = self.positions(batch)
        position = position.expand(len(keep_BK), *position.shape[-2:])
        context = context + gather_tokens(position, keep_BK)
        masked = masked + gather_blocks(position, targets_BMT)
        # every block is predicted beside its own copy of the context and sees no other block
        context = context.unsqueeze(1).expand(-1, targets_BMT.shape[1], -1, -1)
        decoded = self.blocks(torch.cat([context, masked], dim=2).flatten(0, 1))
        features = self.norm(decoded[:, context.shape[2] :])
        return features.unflatten(0, targets_BMT.shape[:2])


def gather_blocks(tokens_BND: Tensor, index_BMT: Tensor) -> Tensor:
    """Return the tokens at the positions of several blocks: (B, M, T, D)."""
    flat = gather_tokens(tokens_BND, index_BMT.flatten(1))
    return flat.unflatten(1, index_BMT.shape[1:])
