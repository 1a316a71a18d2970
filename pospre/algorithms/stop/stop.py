"""StoP: stochastic positional embeddings (Bar et al. 2024, arXiv 2308.00566), on I-JEPA.

A target's place is uncertain, so each mask token gets a Gaussian position. Its mean is the sin-cos
position ψ; its covariance σ·A·Aᵀ is learned (Eq. 1 and 2). With A the matrix that projects the
context into the predictor, the token at position j is ψ_j + A·n_j + m̃, n_j ~ N(0, s²·I) (Eq. 3 and
Algorithm 1). Shrinking the noise would thus erase the context. Nothing else changes, including the
loss, and the exported encoder never sees noise.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from pospre import draws
from pospre.algorithms.ijepa.ijepa import FeaturePrediction
from pospre.algorithms.ijepa.predictor import Predictor
from pospre.algorithms.stop.ablations import Variant, head_without_noise
from pospre.batch import VISIBLE, Batch, view_keys
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions import schemes_that
from pospre.nn.positions.scheme import Scheme
from pospre.nn.projections import bias_of

MASKED, CONTEXT = "stop/masked", "stop/context"
BOTH = MASKED, CONTEXT
NOISE = {"masked": (MASKED,), "context": (CONTEXT,), "both": BOTH, "fixed_cov": (MASKED,)}
"""The tokens that get noise, by the batch keys of ε ~ N(0, I); other variants have none."""


class StochasticPredictor(Predictor):
    """Algorithm 1, of which the base class adds ψ to the tokens and predicts from them."""

    def __init__(self, encoder: Scheme, *, options: "StoP", **size: Any) -> None:
        super().__init__(encoder, **size)
        self.noise_std, self.official = options.noise_std, options.official
        self.noisy, self.is_fixed = NOISE[options.variant], options.variant == "fixed_cov"
        self.noise_width = self.dim if self.is_fixed else self.width
        self.mask_token.requires_grad_(not self.official)

    def context_tokens(self, context_BKD: Tensor, batch: Batch) -> Tensor:
        """Return A·s_x + b (line 10), in Table 7 also with noise."""
        return super().context_tokens(context_BKD, batch) + self._noise_of(batch, CONTEXT)

    def masked_tokens(self, targets_BMT: Tensor, batch: Batch) -> Tensor:
        """Return m̃ + A·n (line 11); in the published code b stands for m̃."""
        mean = bias_of(self.embed, self.width) if self.official else self.mask_token
        return mean.expand(*targets_BMT.shape, -1) + self._noise_of(batch, MASKED)

    def _noise_of(self, batch: Batch, key: str) -> Tensor | float:
        return self.noise(batch[key]) if self.training and key in self.noisy else 0.0

    def noise(self, normal: Tensor) -> Tensor:
        """Return A·n with n = s·ε ~ N(0, s²·I) (line 9); n alone if nothing is learned (Fig. 3)."""
        n = self.noise_std * normal
        return n if self.is_fixed else F.linear(n, self.projection)


class Noisy(FeaturePrediction):
    """I-JEPA's head with a ``StochasticPredictor``, whose noise it logs."""

    predictor: StochasticPredictor

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return I-JEPA's measures, and the noise: ``noise_std`` and ``noise_variance``."""
        std = outputs["projection_norm"].new_full((), self.predictor.noise_std)
        return super().metrics(outputs, batch) | {"noise_std": std, "noise_variance": std.square()}


@dataclass(kw_only=True, eq=False)
class StoP(PretrainAlgorithm):
    """Noise on the predictor's positions; a position algorithm on top of ``ijepa``.

    Writes the noise that the variant needs: ``stop/masked`` (B, M, T, D) and ``stop/context`` (B,
    K, D). It is not added in evaluation (``model.eval()``).
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "The predictor gets each place with noise only. How much noise does it learn to accept?",
        evaluation="stop_similarity",
    )

    variant: Variant = "masked"
    """``masked`` (the method: A·n on mask tokens), ``context`` or ``both`` (A·n on the context's
    tokens too), ``fixed_cov`` (s·ε in the predictor's width: nothing learned); or the paper's
    ablations without noise: ``l1`` (loss + λ·Σ|A|), ``lowres_bilinear`` or ``lowres_maxpool``
    (targets also at half the resolution), ``learned_pos``, ``sincos``.
    """
    noise_std: NonNegativeFloat = 0.25
    """s, the standard deviation of n; unused without noise. The paper's σ is a variance, s = √σ;
    its code and weights use 0.25 (0.2 for ViT-H) as s.
    """
    l1_weight: PositiveFloat = 1e-5
    """λ of ``l1``; the paper does not give it."""
    official: bool = False
    """As the published code, add the projection's bias instead of the mask token."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare that it changes I-JEPA's predictor, without which the noise would shrink."""
        return Uses(
            views={},
            on="ijepa",
            replaces_head=True,
            keys=dict.fromkeys(BOTH),
            hint="Its predictor projects the context by a Linear and takes mask tokens: without "
            "one, the learned noise would shrink to nothing.",
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for idle options, or positions that the predictor knows exactly."""
        super().check_encoder(encoder)
        self.check_used("l1_weight", self.variant == "l1", "variant")
        self.check_used("official", self.variant == "masked", "variant")
        predictors = encoder.positions.companion(encoder.positions.dims)
        if predictors is not None and not predictors.is_added:
            raise UserError(
                "stop makes the predictor's positions uncertain, but encoder.positions = "
                f"{encoder.positions.name} tells it exactly, in attention, where a target lies. "
                f"Use {schemes_that('is_added')}."
            )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if other algorithms change the same positions."""
        editors = layout.passes["student"].places
        if CONTEXT in NOISE.get(self.variant, ()) and editors:
            raise UserError(
                f"stop.variant = {self.variant} puts noise on the positions of the context, which "
                f"{', '.join(editors)} changes too. Use stop.variant = masked."
            )
        if self.variant == "learned_pos" and layout.placer is not None:
            raise UserError(
                "stop.variant = learned_pos has one position for every patch, which cannot follow "
                f"the positions of {layout.placer}. Use another variant."
            )

    def head(self, encoder: PatchEncoder, layout: Layout) -> FeaturePrediction:
        """Return I-JEPA's head with another predictor, or with another loss."""
        host: Any = layout.method("ijepa")
        if self.variant in NOISE:
            return Noisy(encoder, host, partial(StochasticPredictor, options=self))
        return head_without_noise(encoder, host, self)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw ε ~ N(0, I), new for every epoch, target block and token."""
        _, blocks, count = batch["ijepa/targets"].shape
        for key in NOISE.get(self.variant, ()):
            keys = view_keys(batch, blocks if key == MASKED else 1, model.seed, key)
            tokens = count if key == MASKED else batch[VISIBLE].shape[1]
            width = model.objectives.of(Noisy).predictor.noise_width
            noise = draws.normal(keys, tokens * width).unflatten(-1, (tokens, width))
            batch[key] = noise if key == MASKED else noise[:, 0]
