"""LUT's ablations (Kim et al. 2024, Table 4): replacements for parts of ``lut.py``."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.batch import Batch, box_key, flip_key, image_key
from pospre.nn.masking import gather_tokens

Supervision = Literal["context", "tokens", "both"]
Distance = Literal["cosine", "infonce", "smooth_l1"]


def infonce(predicted: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return how well a prediction picks its own target among the n targets of a group."""
    predicted, target = F.normalize(predicted, dim=-1), F.normalize(target, dim=-1)
    with torch.autocast(predicted.device.type, enabled=False):
        logits = predicted @ target.mT / temperature
    return -logits.log_softmax(-1).diagonal(dim1=-2, dim2=-1).mean()


def smooth_l1(predicted: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return the mean smooth L1 distance of the embeddings as they are."""
    return F.smooth_l1_loss(predicted, target)


DISTANCES: dict[Distance, Callable[[Tensor, Tensor, float], Tensor]] = {
    "infonce": infonce,
    "smooth_l1": smooth_l1,
}
"""Table 4d, by name: of (S, G, n, D) predictions and targets; the temperature is InfoNCE's."""


def same_patches(whole_BND: Tensor, places_BK: Tensor | None) -> Tensor:
    """Return the teacher's patches at the student's places (Table 4c); None: at all."""
    return whole_BND if places_BK is None else gather_tokens(whole_BND, places_BK)


def share_crop(batch: Batch) -> None:
    """Cut the second view like the first, so that each patch has a patch to learn from."""
    for key in (image_key, flip_key, box_key):
        if key("view") in batch:
            batch[key("second")] = batch[key("view")]
