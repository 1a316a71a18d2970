"""Label propagation by similarity of frozen features (DINO, Caron et al. 2021; Jabri 2020).

Every patch of a frame takes the labels of its most similar patches in earlier frames (the first and
the last few), within a radius. This module also has J and F of masks, as defined by DAVIS (Perazzi
et al. 2016).
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from pospre.evaluation.dense.settings import VideoSegmentation

_ROWS = 1024  # patches at once: with 8 frames of 6000 patches, similarities take 200 MB


def propagate(
    features: Iterable[Tensor], labels_hwC: Tensor, settings: VideoSegmentation
) -> Iterator[Tensor]:
    """Yield the labels (h, w, C), shares of classes, of every frame after the first.

    The features of a frame are (h, w, D), ``labels_hwC`` the first frame's labels.
    """
    frames = (F.normalize(each.flatten(0, 1), dim=-1) for each in features)
    rows, columns = labels_hwC.shape[:2]
    near_NN = _near(rows, columns, settings.radius).to(labels_hwC.device)
    first = next(frames), labels_hwC.flatten(0, 1)
    known: deque[tuple[Tensor, Tensor]] = deque(maxlen=settings.context_frames)
    for queries_ND in frames:
        keys_KD, labels_KC = map(torch.cat, zip(first, *known, strict=True))
        labels_NC = _attend(queries_ND, keys_KD, labels_KC, near_NN, settings)
        known.append((queries_ND, labels_NC))
        yield labels_NC.unflatten(0, (rows, columns))


def _attend(
    queries_ND: Tensor,
    keys_KD: Tensor,
    labels_KC: Tensor,
    near_NN: Tensor,
    settings: VideoSegmentation,
) -> Tensor:
    """Return labels (N, C): the mean of the most similar patches', weighted by exp(cosine / T).

    Queries are a frame's normalised features, keys those of other frames. ``near_NN`` says whether
    a patch (row) may use one of another frame (column).
    """
    frames, parts = len(keys_KD) // len(near_NN), []
    for start in range(0, len(queries_ND), _ROWS):
        rows = slice(start, start + _ROWS)
        cosine = queries_ND[rows] @ keys_KD.T
        cosine = cosine.masked_fill(~near_NN[rows].repeat(1, frames), -torch.inf)
        best = cosine.topk(min(settings.neighbours, len(keys_KD)), dim=1)
        weights = (best.values / settings.temperature).softmax(dim=1)
        parts.append((weights.unsqueeze(-1) * labels_KC[best.indices]).sum(1))
    return torch.cat(parts)


def _near(rows: int, columns: int, radius: int) -> Tensor:
    """Return bool (N, N): whether two patches lie within ``radius`` in both directions.

    Computed as a product of rows and columns: offsets of 6000 × 6000 patches would take a gigabyte.
    """
    row, column = (
        (torch.arange(side)[:, None] - torch.arange(side)).abs() <= radius
        for side in (rows, columns)
    )
    return torch.kron(row, column)


TOLERANCE = 0.008  # of the diagonal


def region_similarity(found_HW: ndarray, true_HW: ndarray) -> float:
    """Return J: intersection over union of two bool masks; 1 if both are empty."""
    union = (found_HW | true_HW).sum()
    return float((found_HW & true_HW).sum() / union) if union else 1.0


def contour_accuracy(found_HW: ndarray, true_HW: ndarray) -> float:
    """Return F: harmonic mean of precision and recall of the two masks' contours.

    A contour pixel is correct if the other contour passes within ⌈0.008 · diagonal⌉ pixels.
    """
    radius = np.ceil(TOLERANCE * np.linalg.norm(found_HW.shape))
    found, true = contour(found_HW), contour(true_HW)
    if not found.any() and not true.any():
        return 1.0
    if not found.any() or not true.any():
        return 0.0
    precision = (distance_transform_edt(~true)[found] <= radius).mean()
    recall = (distance_transform_edt(~found)[true] <= radius).mean()
    total = precision + recall
    return float(2 * precision * recall / total) if total else 0.0


def contour(mask_HW: ndarray) -> ndarray:
    """Return bool: pixels that differ from their right, lower or lower right neighbour."""
    padded = np.pad(mask_HW, ((0, 1), (0, 1)), mode="edge")
    right, below, both = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    different: ndarray = (mask_HW != right) | (mask_HW != below) | (mask_HW != both)
    return different
