"""SIGReg: features that are Gaussian along random directions (arXiv 2511.08544)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre import draws
from pospre.collectives import num_ranks, sum_over_ranks
from pospre.errors import UserError
from pospre.model.progress import Progress

_LAST, _STEPS = 3.0, 16
"""The knots lie in (0, 3], in so many steps; at 0 all characteristic functions are 1."""
_LEAST = 3  # of two samples, equal ones cost 0.8 and Gaussian ones 1.05
_SHARES = 2**40  # steps of a training whose number of steps is not known


class SIGReg(nn.Module):
    """Epps and Pulley's test of normality along random slices, as a loss of sets of features.

    Along a slice it compares the characteristic function of a set with that of N(0, 1): the squared
    distance, weighted by e^(−t²/2), over t in [−3, 3], times the number of samples. Gaussian
    features cost 1.05 however many there are, and equal ones 0.40 for each. The samples of a set
    are those of all ranks, which all have the same number.

    Args:
        dim: width of the features.
        num_slices: S.
    """

    def __init__(self, dim: int, num_slices: int = 1024) -> None:
        super().__init__()
        # not 0, of which all features are as far from Gaussian as equal ones, without a gradient
        self.slices_DS = nn.Buffer(torch.full((dim, num_slices), torch.nan), persistent=False)
        step = _LAST / _STEPS
        self.knots_K = nn.Buffer(step * torch.arange(1, _STEPS + 1), persistent=False)
        weights = torch.tensor([2 * step] * (_STEPS - 1) + [step])  # both signs of t
        self.trapezoid_K = nn.Buffer(weights, persistent=False)

    def draw(self, seed: int, progress: Progress) -> None:
        """Draw the slices of a step, from the seed and the step alone: equal on all ranks."""
        step = round(progress.step * (progress.num_steps or _SHARES))
        index = torch.full((1,), step, device=self.slices_DS.device)
        keys = draws.sample_keys(seed, 0, index, 0, "sigreg")
        normal = draws.normal(keys, self.slices_DS.numel()).view_as(self.slices_DS)
        self.slices_DS.copy_(F.normalize(normal, dim=0))

    def forward(self, features_VND: Tensor) -> Tensor:
        """Return the mean statistic over V sets of N samples, and over the slices.

        Raises:
            UserError: so few samples that equal features would cost less than Gaussian ones.
        """
        count = features_VND.shape[1] * num_ranks()
        if self.training and count < _LEAST:
            raise UserError(
                f"SIGReg of {count} sample{'s' * (count > 1)} costs less if features are equal "
                f"than if they are Gaussian. Compute {_LEAST} or more at once: raise "
                "data.batch_size, or trainer.microbatch_size; no last microbatch may be smaller."
            )
        with torch.autocast(features_VND.device.type, enabled=False):
            features = features_VND.to(torch.promote_types(features_VND.dtype, torch.float32))
            knots_K = self.knots_K.to(features)
            normal_K = (-knots_K.square() / 2).exp()
            angles_VNSK = (features @ self.slices_DS.to(features)).unsqueeze(-1) * knots_K
            waves = torch.stack([angles_VNSK.cos().sum(1), angles_VNSK.sin().sum(1)])
            real, imaginary = (sum_over_ranks(waves) / count).unbind()
            distance_VSK = (real - normal_K).square() + imaginary.square()
            return count * (distance_VSK @ (self.trapezoid_K * normal_K)).mean()
