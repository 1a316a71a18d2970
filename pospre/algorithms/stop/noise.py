"""Stochastic positions in the predictor's input (Bar et al. 2024, Sec. 3).

This module makes c = A·s + b for the context and m = A·n + m̃ for the targets (Algorithm 1, lines
10 and 11). The predictor then adds ψ, the deterministic positions.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.ijepa.predictor import PredictorTokens
from pospre.batch import Batch, view_keys
from pospre.nn.projections import bias_of, weight_of


class StochasticTokens(PredictorTokens):
    """The method: each mask token has a position that is drawn in training.

    Attributes:
        noise_std: s, the standard deviation of n.
        in_dim: width of the encoder's tokens.
        dim: width of the predictor's.
        official: b stands for m̃, as in the published code.
    """

    def __init__(self, noise_std: float, in_dim: int, dim: int, *, official: bool = False) -> None:
        super().__init__()
        self.noise_std, self.official = noise_std, official
        self.in_dim, self.dim = in_dim, dim

    def masked(
        self, targets_BMT: Tensor, mask_token: Tensor, embed: nn.Linear, batch: Batch
    ) -> Tensor:
        """Return A·n + m̃; without training m̃."""
        shared = bias_of(embed, self.in_dim) if self.official else mask_token
        masked = shared.expand(*targets_BMT.shape, -1)
        if not self.training:
            return masked
        return masked + self.offset(batch["stop/masked"], embed)

    def offset(self, normal: Tensor, embed: nn.Linear) -> Tensor:
        """Return A·n, what Eq. 3 adds to ψ, with n of the covariance s²·I."""
        return F.linear(self.noise_std * normal, weight_of(embed, self.in_dim))

    @property
    def width(self) -> int:
        """The number of channels of n."""
        return self.in_dim

    def draw(self, batch: Batch, seed: int) -> None:
        """Write ``stop/masked`` (B, M, T, D), new for every epoch, target block and token."""
        _, blocks, tokens = batch["ijepa/targets"].shape
        keys = view_keys(batch, blocks, seed, "stop/masked")
        batch["stop/masked"] = standard_normal(keys, tokens, self.width)


def standard_normal(keys: Tensor, tokens: int, channels: int) -> Tensor:
    """Return draws from N(0, I) for ``tokens`` of every key: (…, tokens, channels)."""
    return draws.normal(keys, tokens * channels).unflatten(-1, (tokens, channels))
