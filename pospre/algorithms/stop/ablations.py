"""The paper's ablations without noise (Bar et al. 2024, Sec. 4.2 and 4.3)."""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from pospre.algorithms.ijepa.ijepa import IJEPA, FeaturePrediction
from pospre.algorithms.ijepa.predictor import Predictor, gather_blocks
from pospre.batch import Batch
from pospre.model.objective import Outputs
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.positions.scheme import Scheme
from pospre.nn.positions.table import Table

WithNoise = Literal["masked", "context", "both", "fixed_cov"]
WithoutNoise = Literal["l1", "lowres_bilinear", "lowres_maxpool", "learned_pos", "sincos"]
Variant = Literal[WithNoise, WithoutNoise]


class TablePredictor(Predictor):
    """A predictor with learned positions."""

    def __init__(self, encoder: Scheme, **size: Any) -> None:
        super().__init__(encoder, **size)
        self.positions = Table(self.positions.dims)
        self.positions.reset_parameters()


class ProjectionL1(FeaturePrediction):
    """Adds λ·Σ|A|: shrinks the projection of the context without any noise (Sec. 4.3)."""

    def __init__(self, encoder: PatchEncoder, host: IJEPA, l1_weight: float) -> None:
        super().__init__(encoder, host)
        self.l1_weight = l1_weight

    def compared(self, features: Tensor, whole_BND: Tensor, targets_BMT: Tensor) -> Outputs:
        """Return also the penalty ``l1``."""
        penalty = self.l1_weight * self.predictor.projection.float().abs().sum()
        return {**super().compared(features, whole_BND, targets_BMT), "l1": penalty}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return I-JEPA's loss and the penalty."""
        return super().loss(outputs, batch) + outputs["l1"]


class CoarseTargets(FeaturePrediction):
    """A second head predicts the targets at half the resolution, as we read the paper (Table 8)."""

    def __init__(self, encoder: PatchEncoder, host: IJEPA, *, pools: bool) -> None:
        super().__init__(encoder, host)
        self.pools = pools
        self.predict_coarse = nn.Linear(host.predictor_dim, encoder.embed_dim)
        init_trunc_normal(self.predict_coarse)

    def compared(self, features: Tensor, whole_BND: Tensor, targets_BMT: Tensor) -> Outputs:
        """Return also predicted and true features of the coarser map."""
        return {
            **super().compared(features, whole_BND, targets_BMT),
            "coarse_predicted": self.predict_coarse(features),
            "coarse_target": gather_blocks(self.coarse(whole_BND), targets_BMT),
        }

    def coarse(self, target_BND: Tensor) -> Tensor:
        """Return the map halved and repeated to its size: (B, N, D)."""
        whole = target_BND.transpose(1, 2).unflatten(2, self.grid)
        half = (max(1, self.grid[0] // 2), max(1, self.grid[1] // 2))
        if self.pools:
            small = F.adaptive_max_pool2d(whole, half)
        else:
            small = F.interpolate(whole, half, mode="bilinear")
        return F.interpolate(small, self.grid).flatten(2).transpose(1, 2)

    def target_loss(self, outputs: Outputs) -> Tensor:
        """Return the mean over both scales."""
        coarse = self.distance(outputs["coarse_predicted"], outputs["coarse_target"])
        return (super().target_loss(outputs) + coarse) / 2


def head_without_noise(encoder: PatchEncoder, host: IJEPA, options: Any) -> FeaturePrediction:
    """Return I-JEPA's head for a variant of ``StoP``."""
    if options.variant == "l1":
        return ProjectionL1(encoder, host, options.l1_weight)
    if options.variant.startswith("lowres"):
        return CoarseTargets(encoder, host, pools=options.variant == "lowres_maxpool")
    kind = TablePredictor if options.variant == "learned_pos" else Predictor
    return FeaturePrediction(encoder, host, kind)
