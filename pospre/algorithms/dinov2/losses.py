"""DINOv2's targets (Sinkhorn-Knopp, or centering and sharpening) and losses (DINO, iBOT, KoLeo).

Targets depend on all samples seen together, on all ranks. Unlike MAE's, the losses of DINOv2
therefore depend on the batch and not only on the sample.
"""

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pospre.collectives import is_joined

Centering = Literal["sinkhorn", "centering"]


@torch.no_grad()
def sinkhorn(
    logits_MK: Tensor,
    temperature: Tensor | float,
    weights_M: Tensor | None = None,
    iterations: int = 3,
) -> Tensor:
    """Return soft assignments (M, K) that use all prototypes equally (Caron et al. 2020, SwAV).

    The two steps alternate: every prototype gets the same share of all samples, then every sample
    sums to 1. The samples come last, so each row is a distribution. All ranks solve one problem
    together, and each gets its rows; ranks with only padding take part too.

    The matrix is never rewritten: only its factors per prototype and per sample are. Logits are
    shifted by the largest of each prototype and then of each sample, so nothing overflows or
    vanishes.

    Args:
        logits_MK: the teacher's logits.
        temperature: they are divided by it.
        weights_M: rows of weight 0 are padding: they count for nothing and come back as zeros.
        iterations: number of iterations of the two steps.
    """
    with torch.autocast(logits_MK.device.type, enabled=False):
        # of one dimension: half precision is promoted while it is divided, and copied no more
        divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits_MK.device).view(1)
        scores = logits_MK / divisor
        valid = torch.ones_like(scores[:, 0], dtype=torch.bool)
        shown_MK = logits_MK
        if weights_M is not None:
            valid = weights_M > 0
            shown_MK = logits_MK.masked_fill(~valid.unsqueeze(1), -torch.inf)
        # a prototype's factor does not matter before its first normalisation; of the largest logit
        # the quotient is the largest
        top_K = _reduce(shown_MK.amax(0) / divisor, dist.ReduceOp.MAX)
        scores.sub_(torch.where(top_K.isfinite(), top_K, 0))
        top_M = scores.amax(1)
        matrix = scores.sub_(top_M.unsqueeze(1)).exp_()
        sample = torch.where(valid, top_M.exp(), 0)
        for _ in range(iterations):
            prototype = 1 / _reduce(sample @ matrix).clamp_min(1e-30)  # nothing but padding
            sample = torch.where(valid, 1 / (matrix @ prototype), 0)
        return matrix.mul_(prototype).mul_(sample.unsqueeze(1))


class Center(nn.Module):
    """Centering and sharpening (DINO): softmax of the logits minus their running mean.

    The mean of a batch enters the centre after the step. It is a mean over the samples of all
    microbatches and ranks.

    Args:
        num_prototypes: K.
        momentum: share of the centre that stays.
    """

    def __init__(self, num_prototypes: int, *, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.center_K = nn.Buffer(torch.zeros(num_prototypes))
        self.total_K = nn.Buffer(torch.zeros(num_prototypes), persistent=False)
        self.count = nn.Buffer(torch.zeros(()), persistent=False)

    @torch.no_grad()
    def forward(
        self, logits_MK: Tensor, temperature: Tensor | float, weights_M: Tensor | None = None
    ) -> Tensor:
        """Return soft assignments (M, K); arguments as of ``sinkhorn``."""
        logits_MK = logits_MK.float()
        valid = torch.ones_like(logits_MK[:, :1]) if weights_M is None else weights_M[:, None] > 0
        targets = torch.softmax((logits_MK - self.center_K) / temperature, dim=-1) * valid
        if self.training:
            self.total_K.add_(_reduce((logits_MK * valid).sum(0)))
            self.count.add_(_reduce(valid.float().sum()))
        return targets

    @torch.no_grad()
    def after_step(self) -> None:
        """Let the centre follow the logits since the last call; without any, it stays."""
        mean = torch.where(self.count > 0, self.total_K / self.count.clamp_min(1), self.center_K)
        self.center_K.lerp_(mean, 1 - self.momentum)
        self.total_K.zero_()
        self.count.zero_()


class Targets(nn.Module):
    """The teacher's logits as targets, by Sinkhorn-Knopp or by centering.

    Args:
        kind: ``sinkhorn`` (keeps no state) or ``centering``.
        num_prototypes: K.
    """

    def __init__(self, kind: Centering, num_prototypes: int) -> None:
        super().__init__()
        self.center = Center(num_prototypes) if kind == "centering" else None

    def forward(
        self, logits_MK: Tensor, temperature: Tensor | float, weights_M: Tensor | None = None
    ) -> Tensor:
        """Return soft assignments (M, K) without gradient; arguments as of ``sinkhorn``."""
        if self.center is not None:
            return self.center(logits_MK, temperature, weights_M)
        return sinkhorn(logits_MK, temperature, weights_M)

    def after_step(self) -> None:
        """Move the centre, if any."""
        if self.center is not None:
            self.center.after_step()


def _reduce(value: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return ``value`` combined over all ranks; in place, and itself without a process group."""
    if is_joined():
        dist.all_reduce(value, operation)
    return value


def soft_cross_entropy(student_logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return −Σ_k t·log softmax(s / temperature), float32 (...,), of logits, targets (..., K)."""
    log_prob = F.log_softmax(student_logits.float() / temperature, dim=-1)
    return -(targets * log_prob).sum(-1)


def cross_view_entropy(student_BSK: Tensor, targets_B2K: Tensor, temperature: float) -> Tensor:
    """Return each crop's cross-entropy with the other global crops: (B, S).

    Args:
        student_BSK: the student's logits of both global crops, then of the local crops.
        targets_B2K: the teacher's targets of the global crops.
        temperature: the student's.
    """
    num_local = student_BSK.shape[1] - 2
    # cross-entropy is linear in the target: a local crop uses the sum of both targets once
    local = targets_B2K.sum(1, keepdim=True).expand(-1, num_local, -1)
    targets = torch.cat([targets_B2K.flip(1), local], dim=1)
    return soft_cross_entropy(student_BSK, targets, temperature)


def cross_view_loss(cross_entropy_BS: Tensor) -> Tensor:
    """Return DINO's loss: the mean over all pairs of a crop and another global crop."""
    num_local = cross_entropy_BS.shape[1] - 2
    return cross_entropy_BS.mean(0).sum() / (2 + 2 * num_local)


def patch_loss(cross_entropy_S: Tensor, weights_S: Tensor, num_crops: int) -> Tensor:
    """Return iBOT's loss: per crop the mean over its masked patches, then the mean over crops.

    Crops without masked patches count in that mean, as in the published code.

    Args:
        cross_entropy_S: of the masked patches.
        weights_S: 1 / the number of masked patches of the patch's crop; 0 for padding.
        num_crops: all crops, masked or not.
    """
    return (weights_S * cross_entropy_S).sum() / num_crops


def koleo(features_BD: Tensor) -> Tensor:
    """Return −mean log distance to the nearest other sample of this rank's batch (KoLeo).

    Sablayrolles et al. 2019, as in DINOv2: on the unit sphere, with the neighbour by cosine. It
    computes in float32, as the published code intends: in half precision, equal features give
    infinity there. A single image has no neighbour; its loss is 0.
    """
    if len(features_BD) < 2:
        return features_BD.float().sum() * 0
    with torch.autocast(features_BD.device.type, enabled=False):
        features = F.normalize(features_BD.float(), dim=-1, eps=1e-8)
        with torch.no_grad():
            cosines = features @ features.T
            nearest = cosines.fill_diagonal_(-1).argmax(1)
        distance = F.pairwise_distance(features, features[nearest], eps=1e-8)
        return -(distance + 1e-8).log().mean()


@torch.no_grad()
def measures(class_logits_BSK: Tensor, targets_B2K: Tensor) -> dict[str, Tensor]:
    """Return how often the student predicts the teacher's prototype, and how sharp targets are.

    ``agreement``: share of class tokens whose likeliest prototype is the teacher's on the other
    global crop (on the first, for local crops). ``entropy``: of a target, in nats; 0 and log K are
    the two ways to collapse.
    """
    wanted = targets_B2K.argmax(-1)
    num_local = class_logits_BSK.shape[1] - 2
    wanted = torch.cat([wanted.flip(1), wanted[:, :1].expand(-1, num_local)], dim=1)
    return {
        "agreement": (class_logits_BSK.argmax(-1) == wanted).float().mean(),
        "entropy": torch.special.entr(targets_B2K).sum(-1).mean(),
    }
