"""J and F of video object segmentation as DAVIS defines them (Perazzi et al. 2016)."""

import numpy as np
from numpy import ndarray
from scipy.ndimage import distance_transform_edt

TOLERANCE = 0.008  # of the diagonal


def region_similarity(found_HW: ndarray, true_HW: ndarray) -> float:
    """Return J: intersection over union of two bool masks; 1 where both are empty."""
    union = (found_HW | true_HW).sum()
    return float((found_HW & true_HW).sum() / union) if union else 1.0


def contour_accuracy(found_HW: ndarray, true_HW: ndarray) -> float:
    """Return F: harmonic mean of precision and recall of one mask's contour on the other's.

    A pixel of a contour is right if the other contour passes within ⌈0.008 · diagonal⌉ pixels.
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
    """Return the pixels that differ from the one to the right, below, or both (bool)."""
    padded = np.pad(mask_HW, ((0, 1), (0, 1)), mode="edge")
    right, below, both = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    different: ndarray = (mask_HW != right) | (mask_HW != below) | (mask_HW != both)
    return different
