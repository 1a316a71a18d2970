"""StoP: stochastic positional embeddings (Bar et al. 2024, arXiv 2308.00566), on I-JEPA.

A target's place is uncertain, so each mask token gets a Gaussian position. Its mean is the sin-cos
position ψ; its covariance σ·A·Aᵀ is learned (Eq. 1 and 2). With A the matrix that projects the
context into the predictor, the token at position j is ψ_j + A·n_j + m̃, n_j ~ N(0, s²·I) (Eq. 3 and
Algorithm 1). Shrinking the noise would thus erase the context. Nothing else changes, including the
loss, and the exported encoder never sees noise.

``noise.py`` has these tokens, ``variants.py`` the paper's alternatives.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat

from pospre.algorithms.ijepa.ijepa import FeaturePrediction
from pospre.algorithms.stop.noise import StochasticTokens
from pospre.algorithms.stop.variants import NOISY_CONTEXT, VARIANTS, Variant
from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.needs import Needs
from pospre.model.task_description import TaskDescription
from pospre.nn.positions import schemes_that
from pospre.nn.vit import Encoder


@dataclass(kw_only=True, eq=False)
class StoP(PretrainAlgorithm):
    """Noise on the predictor's positions; a position algorithm on top of ``ijepa``.

    Writes standard normal draws, as the variant needs them: ``stop/masked`` (B, M, T, D), new for
    every epoch, target block and token, and ``stop/context`` (B, K, D). Without ``training``
    (``model.eval()``) nothing is added.

    Args:
        variant: ``masked`` (the method: A·n on mask tokens), ``context`` or ``both`` (A·n on the
            context's tokens too), ``fixed_cov`` (s·ε in the predictor's width: nothing learned);
            or, without noise, the paper's other ablations: ``l1`` (loss + λ·Σ|A|),
            ``lowres_bilinear`` and ``lowres_maxpool`` (a second head predicts targets at half the
            resolution, and the losses are averaged), ``learned_pos`` (the predictor's positions are
            learned), and ``sincos``, which is I-JEPA.
        noise_std: s, the standard deviation of n; None: 0.25. Variants without noise ignore it, so
            that ``variant`` alone makes an ablation of a recipe. The paper's σ is a variance, s =
            √σ; its code and published weights use the same 0.25 (0.2 for ViT-H) as the standard
            deviation.
        l1_weight: λ of ``l1``; None: 1e-5 there.
        official: the published code where it differs: the mask token is never added, and the
            projection's bias is, with the noise.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "The predictor gets each place with noise only. How much noise does it learn to accept?",
        evaluation="stop_similarity",
    )

    variant: Variant = "masked"
    noise_std: NonNegativeFloat | None = None
    l1_weight: PositiveFloat | None = None
    official: bool = False

    def needs(self, encoder: Encoder) -> Needs:
        """Return its requirements: I-JEPA's predictor, without which the noise would shrink."""
        return Needs(
            views={},
            objective=(FeaturePrediction, "ijepa"),
            hint="Its predictor projects the context by a Linear and takes mask tokens: without "
            "one, the learned noise would shrink to nothing.",
        )

    def attach(self, model: PretrainModel) -> None:
        """Replace parts of I-JEPA's predictor."""
        objective = model.objectives.of(FeaturePrediction)
        self.check_used("l1_weight", self.variant == "l1", "variant")
        self.check_used("official", self.variant == "masked", "variant")
        for key in ("stop/masked", "stop/context"):
            model.registry.claim(key, "stop")
        predictor, replaced = objective.predictor, VARIANTS[self.variant]
        if replaced.tokens is not None:
            std = 0.25 if self.noise_std is None else self.noise_std
            widths = model.encoder.embed_dim, predictor.dim
            predictor.tokens = replaced.tokens(std, *widths, official=self.official)
            predictor.mask_token.requires_grad_(not self.official)
        if replaced.positions is not None:
            predictor.positions = replaced.positions(predictor.positions.space)
            predictor.positions.reset_parameters()
        if replaced.extra is not None:
            weight = 1e-5 if self.l1_weight is None else self.l1_weight
            objective.extra = replaced.extra(predictor, weight)

    def check_company(self, model: PretrainModel) -> None:
        """Raise ``UserError`` if positions are not added, or if others change them too."""
        predictor = model.objectives.of(FeaturePrediction).predictor
        if not predictor.positions.is_added:
            raise UserError(
                "stop makes the predictor's positions uncertain, but encoder.positions = "
                f"{model.encoder.positions.name} tells it exactly, in attention, where a target "
                f"lies. Use {schemes_that('is_added')}."
            )
        editors = model.registry.passes["student"].places
        if self.variant in NOISY_CONTEXT and editors:
            raise UserError(
                f"stop.variant = {self.variant} puts noise on the positions of the context, which "
                f"{', '.join(editors)} changes too. Use stop.variant = masked."
            )
        if self.variant == "learned_pos" and model.registry.place_source is not None:
            raise UserError(
                "stop.variant = learned_pos has one position for every patch, which cannot follow "
                f"the positions of {model.registry.place_source}. Use another variant."
            )

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw n."""
        predictor = model.objectives.of(FeaturePrediction).predictor
        if isinstance(predictor.tokens, StochasticTokens):
            predictor.tokens.draw(batch, model.seed)
