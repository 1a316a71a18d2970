"""StoP: stochastic positional embeddings (Bar et al. 2024, arXiv 2308.00566), on I-JEPA.

Where a target lies is uncertain, so each mask token gets a Gaussian position: its mean is the
sin-cos position ψ, its covariance is learned. With A the matrix that projects the context into the
predictor, the token at position j is ψ_j + A·n_j + m̃, n_j ~ N(0, s²·I), so that to shrink the noise
would be to erase the context. Nothing else changes, and what is exported never sees noise.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.ijepa.ijepa import ExtraTerm, FeaturePrediction, Loss, feature_distance
from pospre.algorithms.ijepa.predictor import PredictorTokens, gather_blocks
from pospre.batch import EPOCH, INDEX, Batch, view_keys
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.question import Question
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.positions.table import Table

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
NOISY_TARGETS = ("masked", "both", "fixed_cov")
NOISY_CONTEXT = ("context", "both")
NOISY = ("masked", "context", "both", "fixed_cov")


class NoisyTokens(PredictorTokens):
    """The predictor's input with noise that the context's own projection shapes."""

    def __init__(self, options: "StoP") -> None:
        super().__init__()
        self.variant, self.official = options.variant, options.official
        self.noise_std = 0.25 if options.noise_std is None else options.noise_std

    def forward(
        self,
        context_BKD: Tensor,
        targets_BMT: Tensor,
        mask_token: Tensor,
        embed: nn.Linear,
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        """Return A·s + b (+ A·n′) for the context and m̃ (+ A·n) for the targets."""
        context, masked = super().forward(context_BKD, targets_BMT, mask_token, embed, batch)
        if self.official:
            masked = embed.bias.expand_as(masked)
        if not self.training:
            return context, masked
        if self.variant in NOISY_CONTEXT:
            context = context + F.linear(self.noise_std * batch["stop/context"], embed.weight)
        if self.variant == "fixed_cov":
            masked = masked + self.noise_std * batch["stop/masked"]
        elif self.variant in NOISY_TARGETS:
            masked = masked + F.linear(self.noise_std * batch["stop/masked"], embed.weight)
        return context, masked


class ProjectionL1(ExtraTerm):
    """λ·Σ|A|: shrinks the projection of the context without any noise."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, features: Tensor, target_BND: Tensor, embed: nn.Linear, batch: Batch
    ) -> Outputs:
        """Return the penalty."""
        return {"l1": self.weight * embed.weight.float().abs().sum()}

    def combine(self, distance: Tensor, outputs: Outputs, kind: Loss) -> Tensor:
        """Add it."""
        return distance + outputs["l1"]


Pooling = Literal["bilinear", "maxpool"]


class SecondScale(ExtraTerm):
    """A second head that predicts the targets at half the resolution.

    The paper only names this ablation; here the map of targets is halved, brought back to its size
    by repetition, and read at the same positions.
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

    def combine(self, distance: Tensor, outputs: Outputs, kind: Loss) -> Tensor:
        """Return the mean over both scales."""
        coarse = feature_distance(outputs["coarse_predicted"], outputs["coarse_target"], kind)
        return (distance + coarse) / 2


@dataclass(kw_only=True, eq=False)
class StoP(PretrainAlgorithm):
    """Noise on the predictor's positions; a position algorithm beside ``ijepa``.

    Writes standard normal draws: ``stop/masked`` (B, M, T, D), own ones for every epoch, target
    block and token, and ``stop/context`` (B, K, D), as the variant needs them. Without ``training``
    (``model.eval()``) nothing is added.

    Args:
        variant: ``masked`` (the method: A·n on mask tokens), ``context`` or ``both`` (A·n on the
            context's tokens too), ``fixed_cov`` (s·ε in the predictor's width: nothing learned);
            or, without noise, the paper's other ablations: ``l1`` (loss + λ·Σ|A|),
            ``lowres_bilinear`` and ``lowres_maxpool`` (a second head predicts targets at half the
            resolution, and the losses are averaged), ``learned_pos`` (the predictor's positions are
            learned), and ``sincos``, which is I-JEPA.
        noise_std: s, the standard deviation of n; None: 0.25. Variants without noise leave it
            unused, so that ``variant`` alone makes an ablation of a recipe. The paper's σ is a
            variance, s = √σ; its code and published weights take the same 0.25 (0.2 for ViT-H) as
            the standard deviation.
        l1_weight: λ of ``l1``; None: 1e-5 there.
        official: the published code where it differs: the mask token is never added, and the
            projection's bias is, with the noise.
    """

    question: ClassVar[Question | None] = Question(
        "The predictor is told of a place with noise only. Which noise does it learn to bear?",
        evaluation="stop_similarity",
    )

    variant: Variant = "masked"
    noise_std: NonNegativeFloat | None = None
    l1_weight: PositiveFloat | None = None
    official: bool = False

    def attach(self, model: PretrainModel) -> None:
        """Replace parts of I-JEPA's predictor; a no-op if that is done."""
        objective = _predictor_of(model)
        _check(self, model)
        if objective.edited_by == "stop":
            return
        objective.edited_by = "stop"
        for key in ("stop/masked", "stop/context"):
            model.registry.claim(key, "stop")
        predictor, width = objective.predictor, model.encoder.embed_dim
        if self.variant in NOISY:
            predictor.tokens = NoisyTokens(self)
            predictor.mask_token.requires_grad_(not self.official)
        elif self.variant == "l1":
            objective.extra = ProjectionL1(1e-5 if self.l1_weight is None else self.l1_weight)
        elif self.variant == "learned_pos":
            predictor.positions = Table(predictor.positions.space)
            predictor.positions.reset_parameters()
        elif self.variant != "sincos":
            pooling: Pooling = "bilinear" if self.variant == "lowres_bilinear" else "maxpool"
            objective.extra = SecondScale(predictor.dim, width, model.encoder.grid, pooling)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the noise."""
        predictor, width = _predictor_of(model).predictor, model.encoder.embed_dim
        if self.variant in NOISY_TARGETS:
            _, blocks, tokens = batch["ijepa/targets"].shape
            channels = predictor.dim if self.variant == "fixed_cov" else width
            keys = view_keys(batch, blocks, model.seed, "stop/masked")
            batch["stop/masked"] = _noise(keys, tokens, channels)
        if self.variant in NOISY_CONTEXT:
            tokens = batch["view/keep"].shape[1]
            keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, "stop/context")
            batch["stop/context"] = _noise(keys, tokens, width)


def _noise(keys: Tensor, tokens: int, channels: int) -> Tensor:
    return draws.normal(keys, tokens * channels).unflatten(-1, (tokens, channels))


def _predictor_of(model: PretrainModel) -> FeaturePrediction:
    """Return the objective that StoP edits.

    Raises:
        UserError: there is none.
    """
    for name in model.objectives:
        objective = model.objectives[name]
        if isinstance(objective, FeaturePrediction):
            return objective
    raise UserError(
        "algorithms.stop needs a predictor that projects the context by a Linear and takes mask "
        "tokens: without one, the learned noise would shrink to nothing. Add the host ijepa, which "
        f"has one; here: {', '.join(model.objectives) or 'no host'}."
    )


def _check(options: StoP, model: PretrainModel) -> None:
    """Raise ``UserError`` for variants that cannot work, alone or beside other algorithms."""
    if options.l1_weight is not None and options.variant != "l1":
        raise UserError(
            f"stop.l1_weight = {options.l1_weight} is for stop.variant = l1, not "
            f"{options.variant}. Remove it, or change the variant."
        )
    if options.official and options.variant != "masked":
        raise UserError(
            f"stop.official = true reproduces the published code, which has stop.variant = "
            f"masked only, not {options.variant}. Set one of them the other way."
        )
    predictor = _predictor_of(model).predictor
    if not predictor.positions.is_added:
        raise UserError(
            f"stop makes the predictor's positions uncertain, but encoder.positions = "
            f"{model.encoder.positions.name} tells it exactly, in attention, where a target lies. "
            "Use learned or sincos."
        )
    editors = model.registry.passes["student"].places
    if options.variant in NOISY_CONTEXT and editors:
        raise UserError(
            f"stop.variant = {options.variant} puts noise on the positions of the context, which "
            f"{', '.join(editors)} changes too. Use stop.variant = masked."
        )
    if options.variant == "learned_pos" and model.registry.place_source is not None:
        raise UserError(
            f"stop.variant = learned_pos has one position for every patch, which cannot follow "
            f"the positions of {model.registry.place_source}. Use another variant."
        )
