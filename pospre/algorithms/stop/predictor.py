"""I-JEPA's predictor with stochastic positions (Bar et al. 2024, Algorithm 1)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pospre.algorithms.ijepa.ijepa import FeaturePrediction
from pospre.algorithms.ijepa.predictor import Predictor
from pospre.batch import Batch
from pospre.model.objective import Outputs
from pospre.nn.positions.scheme import Scheme
from pospre.nn.projections import bias_of

MASKED, CONTEXT = "stop/masked", "stop/context"
"""Batch keys of n, for mask tokens and for the context's."""


class StochasticPredictor(Predictor):
    """Adds A·n to tokens in training; the base class then adds ψ.

    Attributes:
        noise_std: s, the standard deviation of n.
        noisy: batch keys of n; ``stop/masked`` is the method.
        official: b stands for m̃, as in the published code.
    """

    def __init__(
        self,
        encoder: Scheme,
        *,
        noise_std: float,
        noisy: tuple[str, ...] = (MASKED,),
        official: bool = False,
        **size: Any,
    ) -> None:
        super().__init__(encoder, **size)
        self.noise_std, self.noisy, self.official = noise_std, noisy, official
        self.mask_token.requires_grad_(not official)

    def masked_tokens(self, targets_BMT: Tensor, batch: Batch) -> Tensor:
        """Return A·n + m̃ (line 11)."""
        masked = bias_of(self.embed, self.width) if self.official else self.mask_token
        return self._with_noise(masked.expand(*targets_BMT.shape, -1), batch, MASKED)

    def context_tokens(self, context_BKD: Tensor, batch: Batch) -> Tensor:
        """Return A·s + b (line 10), in Table 7 also with noise."""
        return self._with_noise(super().context_tokens(context_BKD, batch), batch, CONTEXT)

    def _with_noise(self, tokens: Tensor, batch: Batch, key: str) -> Tensor:
        return tokens + self.noise(batch[key]) if self.training and key in self.noisy else tokens

    def noise(self, normal: Tensor) -> Tensor:
        """Return A·n, what Eq. 3 adds to ψ: n = s·ε has the covariance s²·I."""
        return F.linear(self.noise_std * normal, self.projection)

    @property
    def noise_width(self) -> int:
        """The number of channels of n."""
        return self.width


class Noisy(FeaturePrediction):
    """I-JEPA's head with a ``StochasticPredictor``, whose noise it logs."""

    predictor: StochasticPredictor

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return I-JEPA's measures, and the noise: ``noise_std`` and ``noise_variance``."""
        std = outputs["projection_norm"].new_full((), self.predictor.noise_std)
        return {
            **super().metrics(outputs, batch),
            "noise_std": std,
            "noise_variance": std.square(),
        }
