"""Segmentation metrics from confusion matrices, one per image."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy import ndarray


def class_iou(confusion_CC: ndarray) -> ndarray:
    """Return the intersection over union of every class; NaN for classes that do not occur.

    The matrix has pixels by true class (rows) and predicted class.
    """
    right = np.diag(confusion_CC).astype(np.float64)
    union = confusion_CC.sum(0) + confusion_CC.sum(1) - right
    return np.divide(right, union, out=np.full_like(right, np.nan), where=union > 0)


def mean_iou(confusion_CC: ndarray) -> float:
    """Return the mean of ``class_iou`` over the classes that occur (mIoU)."""
    return float(np.nanmean(class_iou(confusion_CC)))


def pixel_accuracy(confusion_CC: ndarray) -> float:
    """Return the share of correct pixels (aAcc)."""
    return float(np.trace(confusion_CC) / confusion_CC.sum())


def class_accuracy(confusion_CC: ndarray) -> float:
    """Return the mean over true classes of their share of correct pixels (mAcc)."""
    true = confusion_CC.sum(1)
    return float((np.diag(confusion_CC)[true > 0] / true[true > 0]).mean())


MEASURES: Mapping[str, Callable[[ndarray], float]] = {
    "mIoU": mean_iou,
    "aAcc": pixel_accuracy,
    "mAcc": class_accuracy,
}


def summarise(confusions_NCC: ndarray) -> dict[str, float]:
    """Return the metrics over all images, each with its standard error (``_se``).

    The error is a jackknife over images: √((n − 1)/n · Σ (θ₋ᵢ − θ̄)²), with θ₋ᵢ without image i.
    """
    total = confusions_NCC.sum(0)
    count = len(confusions_NCC)
    results = {}
    for name, measure in MEASURES.items():
        results[name] = measure(total)
        without = np.array(
            [measure(total - each) for each in confusions_NCC if (total - each).any()]
        )
        spread = (count - 1) / count * ((without - without.mean()) ** 2).sum() if count > 1 else 0.0
        results[f"{name}_se"] = float(np.sqrt(spread))
    return results


def constant(pixels_C: ndarray) -> dict[str, float]:
    """Return the metrics of always predicting the most frequent class (``constant_…``)."""
    share, present = float(pixels_C.max() / pixels_C.sum()), int((pixels_C > 0).sum())
    figures = {"mIoU": share / present, "aAcc": share, "mAcc": 1 / present}
    return {f"constant_{name}": figures[name] for name in MEASURES}
