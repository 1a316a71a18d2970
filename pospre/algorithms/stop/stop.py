"""StoP: stochastic positional embeddings (Bar et al. 2024, arXiv 2308.00566), on I-JEPA.

A target's place is uncertain, so each mask token gets a Gaussian position. Its mean is the sin-cos
position ψ; its covariance σ·A·Aᵀ is learned (Eq. 1 and 2). With A the matrix that projects the
context into the predictor, the token at position j is ψ_j + A·n_j + m̃, n_j ~ N(0, s²·I) (Eq. 3 and
Algorithm 1). Shrinking the noise would thus erase the context. Nothing else changes, including the
loss, and the exported encoder never sees noise.

``predictor.py`` has these tokens, ``ablations.py`` the paper's alternatives.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from pospre import draws
from pospre.algorithms.ijepa.ijepa import IJEPA, FeaturePrediction
from pospre.algorithms.ijepa.predictor import Predictor
from pospre.algorithms.stop.ablations import (
    NOISE,
    CoarseTargets,
    FixedCovariance,
    ProjectionL1,
    TablePredictor,
    Variant,
)
from pospre.algorithms.stop.predictor import CONTEXT, MASKED, Noisy, StochasticPredictor
from pospre.batch import EPOCH, INDEX, VISIBLE, Batch, view_keys
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions import schemes_that


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

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare that it changes I-JEPA's predictor, without which the noise would shrink."""
        self.check_used("l1_weight", self.variant == "l1", "variant")
        self.check_used("official", self.variant == "masked", "variant")
        predictors = encoder.positions.companion(encoder.positions.dims)
        if predictors is not None and not predictors.is_added:
            raise UserError(
                "stop makes the predictor's positions uncertain, but encoder.positions = "
                f"{encoder.positions.name} tells it exactly, in attention, where a target lies. "
                f"Use {schemes_that('is_added')}."
            )
        return Uses(
            views={},
            on="ijepa",
            replaces_head=True,
            keys=dict.fromkeys((MASKED, CONTEXT)),
            hint="Its predictor projects the context by a Linear and takes mask tokens: without "
            "one, the learned noise would shrink to nothing.",
        )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if other algorithms change the same positions."""
        editors = layout.passes["student"].places
        if CONTEXT in NOISE[self.variant] and editors:
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
        assert isinstance(host, IJEPA)
        if noisy := NOISE[self.variant]:
            std = 0.25 if self.noise_std is None else self.noise_std
            made = FixedCovariance if self.variant == "fixed_cov" else StochasticPredictor
            options: dict[str, Any] = {"noise_std": std, "noisy": noisy, "official": self.official}
            return Noisy(encoder, host, partial(made, **options))
        if self.variant == "l1":
            return ProjectionL1(encoder, host, 1e-5 if self.l1_weight is None else self.l1_weight)
        if self.variant in ("lowres_bilinear", "lowres_maxpool"):
            return CoarseTargets(encoder, host, self.variant)
        kind = TablePredictor if self.variant == "learned_pos" else Predictor
        return FeaturePrediction(encoder, host, kind)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw n ~ N(0, I), new for every epoch, target block and token."""
        name = model.layout.named("ijepa")
        assert name is not None
        predictor: Any = model.objectives[name].predictor
        noisy = NOISE[self.variant]
        if MASKED in noisy:
            _, blocks, tokens = batch["ijepa/targets"].shape
            keys = view_keys(batch, blocks, model.seed, MASKED)
            batch[MASKED] = standard_normal(keys, tokens, predictor.noise_width)
        if CONTEXT in noisy:
            keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, CONTEXT)
            tokens = batch[VISIBLE].shape[1]
            batch[CONTEXT] = standard_normal(keys, tokens, predictor.noise_width)


def standard_normal(keys: Tensor, tokens: int, channels: int) -> Tensor:
    """Return draws from N(0, I) for ``tokens`` of every key: (…, tokens, channels)."""
    return draws.normal(keys, tokens * channels).unflatten(-1, (tokens, channels))
