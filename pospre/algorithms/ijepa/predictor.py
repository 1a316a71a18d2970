"""The predictor of features at chosen positions."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.nn.block import DecoderBlocks
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import gather_tokens
from pospre.nn.places import view_places
from pospre.nn.positions import decoder_positions
from pospre.nn.positions.scheme import Scheme, TransformerDims
from pospre.nn.projections import weight_of


class Predictor(nn.Module):
    """A narrow transformer over the context and the mask tokens of one target block at a time.

    Attributes:
        embed: A·s + b, projects the context's tokens s to the predictor's width.
        mask_token: m̃, (1, 1, d), learned.
        positions: the position scheme of its inputs.
    """

    def __init__(self, encoder: Scheme, *, dim: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.width, self.dim, self.grid = encoder.dims.dim, dim, encoder.dims.grid
        self.embed = nn.Linear(encoder.dims.dim, dim)
        self.blocks = DecoderBlocks(dim, depth, num_heads)
        self.norm = nn.LayerNorm(dim, 1e-6)
        init_trunc_normal(self)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        dims = TransformerDims(dim, num_heads, depth, self.grid)
        self.positions: Scheme = decoder_positions(encoder, dims)

    def forward(
        self,
        context_BKD: Tensor,
        visible_BK: Tensor,
        targets_BMT: Tensor,
        batch: Batch,
        *,
        with_context: bool = False,
    ) -> Tensor:
        """Return features at the target positions, (B, M, T, d), after the last norm.

        ``with_context`` returns those at the context's positions before them: (B, M, K+T, d).

        Args:
            context_BKD: the encoder's tokens of the context.
            visible_BK: their positions.
            targets_BMT: the positions of M target blocks.
            batch: may hold noise, and boxes in a position field.
            with_context: see above.
        """
        context = self.context_tokens(context_BKD, batch)
        masked = self.masked_tokens(targets_BMT, batch)
        # every block is predicted with its own copy of the context and sees no other block
        count = targets_BMT.shape[1]
        context = context.unsqueeze(1).expand(-1, count, -1, -1)
        tokens = torch.cat([context, masked], dim=2).flatten(0, 1)
        cells = torch.cat([visible_BK.unsqueeze(1).expand(-1, count, -1), targets_BMT], dim=2)
        places = view_places(batch, "view", self.grid).repeat(count).move(cells.flatten(0, 1))
        tokens = self.positions.added(tokens, places)
        decoded = self.blocks(tokens, self.positions.layer_terms(places))
        features = self.norm(decoded if with_context else decoded[:, context.shape[2] :])
        return features.unflatten(0, targets_BMT.shape[:2])

    @property
    def projection(self) -> Tensor:
        """A, the matrix that projects the context: (d, D)."""
        return weight_of(self.embed, self.width)

    def context_tokens(self, context_BKD: Tensor, batch: Batch) -> Tensor:
        """Return tokens of the context before positions are added, (B, K, d)."""
        return self.embed(context_BKD)

    def masked_tokens(self, targets_BMT: Tensor, batch: Batch) -> Tensor:
        """Return tokens of the target blocks before positions are added, (B, M, T, d)."""
        return self.mask_token.expand(*targets_BMT.shape, -1)


PredictorKind = Callable[..., Predictor]
"""A class of predictors, or a function that makes one of the same arguments."""


def gather_blocks(tokens_BND: Tensor, index_BMT: Tensor) -> Tensor:
    """Return the tokens at the positions of several blocks: (B, M, T, D)."""
    flat = gather_tokens(tokens_BND, index_BMT.flatten(1))
    return flat.unflatten(1, index_BMT.shape[1:])


def nearness(context_BK: Tensor, targets_BMT: Tensor, columns: int) -> Tensor:
    """Return 1 / √d, d the cells from a context token to the nearest of a block: (B, M, K).

    V-JEPA 2.1 (arXiv 2603.14482). d is at least 1; a grid's cells are numbered row by row.
    """
    ends = [
        torch.stack([index // columns, index % columns], dim=-1)
        for index in (context_BK[:, None, :, None], targets_BMT[:, :, None])
    ]
    squared = (ends[0] - ends[1]).square().sum(-1).amin(-1)
    return squared.clamp_min(1).float().pow(-0.25)
