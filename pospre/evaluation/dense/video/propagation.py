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

_ROWS = 1024  # patches at once: with 8 frames of 6000 patches, similarities take 200 MB


def propagate(
    features: Iterable[Tensor],
    labels_hwC: Tensor,
    *,
    neighbours: int,
    context_frames: int,
    radius: int,
    temperature: float,
) -> Iterator[Tensor]:
    """Yield the labels (h, w, C) of every frame after the first.

    Args:
        features: of every frame, (h, w, D).
        labels_hwC: of the first frame, shares of classes.
        neighbours: number of context patches that determine a patch's label.
        context_frames: number of last frames in the context, besides the first one.
        radius: maximal distance of these patches in either direction, in patches.
        temperature: T of the weights exp(cosine / T).
    """
    frames = iter(features)
    first = next(frames)
    rows, columns = labels_hwC.shape[:2]
    near = _near(rows, columns, radius).to(labels_hwC.device)
    known: deque[tuple[Tensor, Tensor]] = deque(maxlen=context_frames)
    for feature in frames:
        context = [(first, labels_hwC), *known]
        labels = attend(
            feature.flatten(0, 1),
            torch.stack([each.flatten(0, 1) for each, _ in context]),
            torch.stack([each.flatten(0, 1) for _, each in context]),
            near,
            neighbours=neighbours,
            temperature=temperature,
        ).unflatten(0, (rows, columns))
        known.append((feature, labels))
        yield labels


def attend(
    queries_ND: Tensor,
    keys_FND: Tensor,
    labels_FNC: Tensor,
    near_NN: Tensor,
    *,
    neighbours: int,
    temperature: float,
) -> Tensor:
    """Return labels (N, C): the mean of the most similar patches', weighted by exp(cosine / T).

    Args:
        queries_ND: features of a frame's patches.
        keys_FND: features of F other frames.
        labels_FNC: their labels.
        near_NN: bool, whether each patch (row) may use another (column).
        neighbours: number of patches used.
        temperature: T.
    """
    queries_ND, keys_FND = F.normalize(queries_ND, dim=-1), F.normalize(keys_FND, dim=-1)
    keys, labels = keys_FND.flatten(0, 1), labels_FNC.flatten(0, 1)
    parts = []
    for start in range(0, len(queries_ND), _ROWS):
        rows = slice(start, start + _ROWS)
        cosine = queries_ND[rows] @ keys.T
        cosine = cosine.masked_fill(~near_NN[rows].repeat(1, len(keys_FND)), -torch.inf)
        best = cosine.topk(min(neighbours, len(keys)), dim=1)
        weights = (best.values / temperature).softmax(dim=1)
        parts.append((weights.unsqueeze(-1) * labels[best.indices]).sum(1))
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
