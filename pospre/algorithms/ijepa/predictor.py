"""The predictor of features at chosen positions, and the parts that algorithms replace or add."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.model.objective import Outputs
from pospre.nn.block import DecoderBlocks
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import gather_tokens
from pospre.nn.places import view_places
from pospre.nn.positions import decoder_positions
from pospre.nn.positions.scheme import Scheme, Space

Measure = Callable[[Tensor, Tensor], Tensor]
"""The distance of predicted and true features."""


class PredictorTokens(nn.Module):
    """The predictor's input before positions are added; StoP replaces it.

    Attributes:
        noise_std: standard deviation of the noise before its projection; 0: none is added.
    """

    noise_std: float = 0.0

    def context(self, context_BKD: Tensor, embed: nn.Linear, batch: Batch) -> Tensor:
        """Return tokens of the context, (B, K, d).

        Args:
            context_BKD: the encoder's.
            embed: projects them to the predictor's width.
            batch: may hold noise.
        """
        return embed(context_BKD)

    def masked(
        self, targets_BMT: Tensor, mask_token: Tensor, embed: nn.Linear, batch: Batch
    ) -> Tensor:
        """Return tokens of the target blocks, (B, M, T, d).

        Args:
            targets_BMT: the positions to predict, for their number.
            mask_token: (1, 1, d), learned.
            embed: see ``context``.
            batch: may hold noise.
        """
        return mask_token.expand(*targets_BMT.shape, -1)


class ExtraTerm(nn.Module, ABC):
    """An extra term of the loss that an algorithm puts into ``FeaturePrediction``."""

    @abstractmethod
    def forward(
        self, features: Tensor, target_BND: Tensor, embed: nn.Linear, batch: Batch
    ) -> Outputs:
        """Return the tensors for ``combine``.

        Args:
            features: (B, M, T, d) of the predictor.
            target_BND: the teacher's layer-normalised features of the whole image.
            embed: the predictor's projection of the context.
            batch: the batch.
        """

    @abstractmethod
    def combine(self, distance: Tensor, outputs: Outputs, measure: Measure) -> Tensor:
        """Return the loss, given the distance of predicted and true features, and its measure."""


class Predictor(nn.Module):
    """A narrow transformer over the context and the mask tokens of one target block at a time.

    Attributes:
        tokens: makes the input from context and mask token.
        positions: the position scheme of its inputs.
    """

    def __init__(self, encoder: Scheme, *, dim: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.dim, self.grid = dim, encoder.space.grid
        self.embed = nn.Linear(encoder.space.dim, dim)
        self.blocks = DecoderBlocks(dim, depth, num_heads)
        self.norm = nn.LayerNorm(dim, 1e-6)
        init_trunc_normal(self)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        self.tokens = PredictorTokens()
        space = Space(dim, num_heads, depth, self.grid)
        self.positions: Scheme = decoder_positions(encoder, space)

    def forward(
        self, context_BKD: Tensor, visible_BK: Tensor, targets_BMT: Tensor, batch: Batch
    ) -> Tensor:
        """Return features at the target positions, (B, M, T, d), after the last norm.

        Args:
            context_BKD: the encoder's tokens of the context.
            visible_BK: their positions.
            targets_BMT: the positions of M target blocks.
            batch: may hold noise, and boxes in a position field.
        """
        context = self.tokens.context(context_BKD, self.embed, batch)
        masked = self.tokens.masked(targets_BMT, self.mask_token, self.embed, batch)
        # every block is predicted with its own copy of the context and sees no other block
        count = targets_BMT.shape[1]
        context = context.unsqueeze(1).expand(-1, count, -1, -1)
        tokens = torch.cat([context, masked], dim=2).flatten(0, 1)
        cells = torch.cat([visible_BK.unsqueeze(1).expand(-1, count, -1), targets_BMT], dim=2)
        places = view_places(batch, "view", self.grid).repeat(count).move(cells.flatten(0, 1))
        tokens = self.positions.added(tokens, places)
        decoded = self.blocks(tokens, self.positions.clues(places))
        features = self.norm(decoded[:, context.shape[2] :])
        return features.unflatten(0, targets_BMT.shape[:2])


def gather_blocks(tokens_BND: Tensor, index_BMT: Tensor) -> Tensor:
    """Return the tokens at the positions of several blocks: (B, M, T, D)."""
    flat = gather_tokens(tokens_BND, index_BMT.flatten(1))
    return flat.unflatten(1, index_BMT.shape[1:])
