"""The losses of DINOv2: DINO over crops, iBOT over masked patches, KoLeo among class tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
