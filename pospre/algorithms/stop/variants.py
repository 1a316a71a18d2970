"""The paper's ablations of StoP (Bar et al. 2024, Sec. 4.2 and 4.3), and the table of variants."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.ijepa.predictor import (
    ExtraTerm,
    Measure,
    Predictor,
    PredictorTokens,
    gather_blocks,
)
from pospre.algorithms.stop.noise import StochasticTokens, standard_normal
from pospre.batch import EPOCH, INDEX, VISIBLE, Batch
from pospre.model.objective import Outputs
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.positions.table import Table
from pospre.nn.projections import weight_of

Pooling = Literal["bilinear", "maxpool"]
Variant = Literal[
    "masked",
    "context",
    "both",
    "fixed_cov",
    "l1",
    "lowres_bilinear",
    "lowres_maxpool",
    "learned_pos",
    "sincos",
]


class NoiseOnBoth(StochasticTokens):
    """A·n′ on the context's tokens, too (Table 7)."""

    def context(self, context_BKD: Tensor, embed: nn.Linear, batch: Batch) -> Tensor:
        """Return A·s + b + A·n′; without training A·s + b."""
        context = super().context(context_BKD, embed, batch)
        if not self.training:
            return context
        return context + self.offset(batch["stop/context"], embed)

    def draw(self, batch: Batch, seed: int) -> None:
        """Write ``stop/masked``, and ``stop/context`` (B, K, D), which does not depend on it."""
        super().draw(batch, seed)
        self.draw_context(batch, seed)

    def draw_context(self, batch: Batch, seed: int) -> None:
        """Write ``stop/context``, new for every epoch and token."""
        keys = draws.sample_keys(seed, batch[EPOCH], batch[INDEX], 0, "stop/context")
        tokens = batch[VISIBLE].shape[1]
        batch["stop/context"] = standard_normal(keys, tokens, self.width)


class NoiseOnContext(NoiseOnBoth):
    """A·n′ on the context's tokens alone (Table 7)."""

    masked = PredictorTokens.masked
    draw = NoiseOnBoth.draw_context


class FixedCovariance(StochasticTokens):
    """s·ε in the predictor's width: the covariance is s²·I and is not learned (Fig. 3)."""

    def offset(self, normal: Tensor, embed: nn.Linear) -> Tensor:
        """Return s·ε."""
        return self.noise_std * normal

    @property
    def width(self) -> int:
        """The predictor's width."""
        return self.dim


class ProjectionL1(ExtraTerm):
    """λ·Σ|A|: shrinks the projection of the context without any noise (Sec. 4.3)."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, features: Tensor, target_BND: Tensor, embed: nn.Linear, batch: Batch
    ) -> Outputs:
        """Return the penalty."""
        return {"l1": self.weight * weight_of(embed, target_BND.shape[-1]).float().abs().sum()}

    def combine(self, distance: Tensor, outputs: Outputs, measure: Measure) -> Tensor:
        """Add it."""
        return distance + outputs["l1"]


class SecondScale(ExtraTerm):
    """A second head that predicts the targets at half the resolution (Table 8).

    The paper only names this ablation. Here the map of targets is halved, enlarged to its size by
    repetition, and read at the same positions.
    """

    def __init__(self, dim: int, encoder_dim: int, grid: tuple[int, int], pooling: Pooling) -> None:
        super().__init__()
        self.grid, self.pooling = grid, pooling
        self.predict = nn.Linear(dim, encoder_dim)
        init_trunc_normal(self)

    def forward(
        self, features: Tensor, target_BND: Tensor, embed: nn.Linear, batch: Batch
    ) -> Outputs:
        """Return predicted and true features of the coarser map."""
        coarse = gather_blocks(self.coarse(target_BND), batch["ijepa/targets"])
        return {"coarse_predicted": self.predict(features), "coarse_target": coarse}

    def coarse(self, target_BND: Tensor) -> Tensor:
        """Return the map halved and repeated to its size: (B, N, D)."""
        picture = target_BND.transpose(1, 2).unflatten(2, self.grid)
        half = (max(1, self.grid[0] // 2), max(1, self.grid[1] // 2))
        if self.pooling == "bilinear":
            small = F.interpolate(picture, size=half, mode="bilinear", align_corners=False)
        else:
            small = F.adaptive_max_pool2d(picture, half)
        return F.interpolate(small, size=self.grid, mode="nearest").flatten(2).transpose(1, 2)

    def combine(self, distance: Tensor, outputs: Outputs, measure: Measure) -> Tensor:
        """Return the mean over both scales."""
        coarse = measure(outputs["coarse_predicted"], outputs["coarse_target"])
        return (distance + coarse) / 2


class Replaced(NamedTuple):
    """Replacements for parts of I-JEPA's predictor; None keeps a part.

    Attributes:
        tokens: the predictor's input before positions are added.
        positions: ψ.
        extra: makes an extra term of the loss, of the predictor and λ.
    """

    tokens: type[StochasticTokens] | None = None
    positions: type[Table] | None = None
    extra: Callable[[Predictor, float], ExtraTerm] | None = None


def _second_scale(pooling: Pooling) -> Replaced:
    def extra(predictor: Predictor, _: float) -> ExtraTerm:
        return SecondScale(predictor.dim, predictor.embed.in_features, predictor.grid, pooling)

    return Replaced(extra=extra)


VARIANTS: dict[Variant, Replaced] = {
    "masked": Replaced(tokens=StochasticTokens),
    "context": Replaced(tokens=NoiseOnContext),
    "both": Replaced(tokens=NoiseOnBoth),
    "fixed_cov": Replaced(tokens=FixedCovariance),
    "l1": Replaced(extra=lambda _, weight: ProjectionL1(weight)),
    "lowres_bilinear": _second_scale("bilinear"),
    "lowres_maxpool": _second_scale("maxpool"),
    "learned_pos": Replaced(positions=Table),
    "sincos": Replaced(),
}
NOISY = tuple(name for name, replaced in VARIANTS.items() if replaced.tokens is not None)
NOISY_CONTEXT = ("context", "both")
